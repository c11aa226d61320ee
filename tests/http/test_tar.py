"""Archives as they come in: what Python's and Go's writers give, and what nobody should."""

from __future__ import annotations

import io
import tarfile
from contextlib import aclosing

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tenplexfs.errors import InvalidError, TooLargeError
from tenplexfs.http.message import read_all
from tenplexfs.http.tar import members


class Bytes:
    """A body that is there, a few bytes at a time."""

    def __init__(self, data: bytes, piece: int = 700) -> None:
        self.size = len(data)
        self._data = data
        self._piece = piece

    async def read_into(self, view: memoryview) -> int:
        await trio.lowlevel.checkpoint()
        count = min(len(view), len(self._data), self._piece)
        view[:count], self._data = self._data[:count], self._data[count:]
        return count


def read(data: bytes, *, may_be_absolute: bool = False, skip: bool = False) -> dict[str, bytes]:
    async def gather() -> dict[str, bytes]:
        found = {}
        async with aclosing(members(Bytes(data), may_be_absolute=may_be_absolute)) as files:
            async for member in files:
                found[member.name] = b"" if skip else await read_all(member, member.name, 1 << 20)
        return found

    return trio.run(gather)


def archive(*files: tuple[str, bytes], format_: int = tarfile.PAX_FORMAT, **fields: object) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format_) as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


NAMES = st.text(st.characters(exclude_characters="/\0.", exclude_categories=["Cs"]), min_size=1, max_size=300)


@given(
    st.dictionaries(NAMES, st.binary(max_size=1500), max_size=4),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    st.booleans(),
)
def test_files_come_out_as_they_went_in(files, format_, skip):
    names = {f"a/{name}": data for name, data in files.items()}
    found = read(archive(*names.items(), format_=format_), skip=skip)
    assert found == (dict.fromkeys(names, b"") if skip else names)


def test_a_name_that_is_no_utf8_is_refused():
    with pytest.raises(InvalidError, match="no UTF-8"):
        read(raw_name(b"\xff\xfe"))


def raw_name(name: bytes) -> bytes:
    info = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape") + bytes(1024)


def test_an_archive_that_nobody_closed_is_whole():
    # As mlfs's client writes it: a header and the data, no padding, no end.
    data = archive(("x", b"abc"))[: 512 + 3]
    assert read(data) == {"x": b"abc"}
    assert read(archive(("x", b"abc"))[:1024]) == {"x": b"abc"}
    assert read(b"") == read(bytes(1024)) == {}


def test_directories_are_passed_over_and_names_may_be_absolute_where_that_is_said():
    data = archive(("d", b""), type=tarfile.DIRTYPE)
    assert read(data) == {}
    assert read(archive(("/job/x", b"1")), may_be_absolute=True) == {"/job/x": b"1"}


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "..", "a/.."])
def test_names_that_lead_out_are_refused(name):
    with pytest.raises(InvalidError, match="leads out"):
        read(archive((name, b"")))
    with pytest.raises(InvalidError, match="leads out"):
        read(archive((f"{'a' * 200}/{name}" if ".." in name else name, b"1"), format_=tarfile.GNU_FORMAT))


@pytest.mark.parametrize(
    "kind",
    [
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
        tarfile.FIFOTYPE,
        tarfile.GNUTYPE_SPARSE,
    ],
)
def test_what_is_no_file_is_refused(kind):
    with pytest.raises(InvalidError, match="need files"):
        read(archive(("x", b""), type=kind, linkname="/etc/passwd"))


def test_a_sparse_file_and_an_endless_name_are_refused():
    with pytest.raises(InvalidError, match="sparse"):
        read(archive(("x", b"1"), pax_headers={"GNU.sparse.major": "1"}))
    with pytest.raises(TooLargeError, match="a name"):
        read(archive(("x" * 100_000, b"1")))


@pytest.mark.parametrize(
    "data",
    [
        b"x" * 512,
        b"x" * 100,
        archive(("x", b"abc"))[:514],
        archive(("x", b"1" * 600), ("y", b"2"))[:1200],
        archive(("x", b"1"), pax_headers={"size": "-1"}),
        archive(("x", b"1"), pax_headers={"comment": "é" * 200}).replace("é".encode(), b"\xff\xff"),
        archive(("x", b"1"), pax_headers={"comment": "c"}).replace(b" comment=c", b"9comment=c"),
    ],
)
@pytest.mark.parametrize("skip", [False, True])
def test_what_is_no_archive_is_refused(data, skip):
    with pytest.raises(InvalidError, match="tar:"):
        read(data, skip=skip)


@given(st.integers(0, 2000), st.binary(min_size=1, max_size=40))
def test_changed_bytes_give_files_or_an_error(at, noise):
    data = bytearray(archive(("x", b"1" * 600), ("y", b"2")))
    data[at : at + len(noise)] = noise
    try:
        read(bytes(data))
    except InvalidError as error:
        assert "\n" not in error.message
