import io
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplexfs.errors import CorruptError, InvalidError, TenplexError
from tenplexfs.formats.zip_directory import END_BYTES, find_directory, parse_directory, unpack_member


class Forward(io.RawIOBase):
    """Cannot seek: zipfile then writes sizes behind the members."""

    def __init__(self):
        super().__init__()
        self.parts = []

    def writable(self):
        return True

    def write(self, data):
        self.parts.append(bytes(data))
        return len(data)


def archive(members, *, method=zipfile.ZIP_STORED, streamed=False, comment=b"", force_zip64=False):
    sink = Forward() if streamed else io.BytesIO()
    with zipfile.ZipFile(sink, "w", method) as file:
        for name, data in members.items():
            with file.open(name, "w", force_zip64=force_zip64) as member:
                member.write(data)
        file.comment = comment
    return b"".join(sink.parts) if streamed else sink.getvalue()


def members_of(data):
    where = find_directory(data[-END_BYTES:], len(data))
    return parse_directory(data[where.begin : where.end], where)


MEMBERS = {"a.npy": b"x" * 1000, "empty": b"", "mit Leer/ü%.npy": bytes(range(256)) * 9}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("force_zip64", [False, True])
@pytest.mark.parametrize("comment", [b"", b"c" * 65535])
def test_what_zipfile_writes(method, streamed, force_zip64, comment):
    data = archive(MEMBERS, method=method, streamed=streamed, comment=comment, force_zip64=force_zip64)
    found = members_of(data)
    assert [(member.name, member.size) for member in found] == [(n, len(d)) for n, d in MEMBERS.items()]
    for member in found:
        assert unpack_member(data[member.begin : member.end], member.size) == MEMBERS[member.name]
        start = unpack_member(data[member.begin : min(member.end, member.begin + 300)], None)
        assert MEMBERS[member.name].startswith(start) or method == zipfile.ZIP_STORED


def test_no_members_and_directories():
    assert members_of(archive({})) == ()
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as file:
        file.mkdir("folder")
        file.writestr("folder/x", b"1")
    assert [member.name for member in members_of(sink.getvalue())] == ["folder/x"]


def test_more_members_than_16_bits_count():
    data = archive({f"{i}": b"" for i in range(70_000)})
    assert len(members_of(data)) == 70_000


def test_offsets_above_four_gib(tmp_path):
    path = tmp_path / "big.npz"
    with path.open("wb") as file:
        file.seek((1 << 32) + 5)  # a sparse file: zip allows anything before the members
        with zipfile.ZipFile(file, "w") as members:
            members.writestr("late", b"late data")
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(size - 1000)
        tail = file.read()
        where = find_directory(tail, size)
        file.seek(where.begin)
        (member,) = parse_directory(file.read(where.end - where.begin), where)
        assert member.begin == (1 << 32) + 5
        file.seek(member.begin)
        assert unpack_member(file.read(member.end - member.begin), member.size) == b"late data"


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@given(data=st.data())
def test_damage_never_gives_other_bytes(method, data):
    body = np.random.default_rng(1).bytes(300)
    packed = archive({"a": body}, method=method)
    (member,) = members_of(packed)
    damaged = bytearray(packed[member.begin : member.end])
    at = data.draw(st.integers(31, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    try:
        assert unpack_member(bytes(damaged), member.size) == body  # a bit that nobody reads
    except CorruptError as error:
        assert "zip member" in error.message


@given(st.binary(max_size=30), st.integers(0, 150))
def test_damaged_directories_end_in_our_errors(noise, at):
    data = archive({"a": b"123", "b": b"456"})
    damaged = data[:at] + noise + data[at + len(noise) :]
    try:
        for member in members_of(damaged):
            unpack_member(damaged[member.begin : member.end], member.size)
    except TenplexError as error:
        assert error.message


def encrypted():
    data = bytearray(archive({"a": b"1"}))
    at = data.index(b"PK\1\2")
    data[at + 8] |= 1
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"not a zip", InvalidError, "no zip archive: no end record in the last 9 bytes"),
        (archive({"a": b"1"})[1:], CorruptError, "need end"),
        (archive({"a": b"1"}, method=zipfile.ZIP_LZMA), InvalidError, "member 'a': method 14"),
        (encrypted(), InvalidError, "member 'a': method 0, flags 0x1"),
        (struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, 0, 0, 0), CorruptError, "entry 0 of 1"),
        (struct.pack("<4s4H2IH", b"PK\5\6", 1, 0, 1, 1, 0, 0, 0), InvalidError, "several parts"),
    ],
)
def test_refusals(data, error, message):
    with pytest.raises(error, match=message):
        members_of(data)
