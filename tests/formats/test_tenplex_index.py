import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplexfs.errors import CorruptError, InvalidError
from tenplexfs.formats.tenplex_index import parse_tenplex_index

NAMES = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), min_size=1, max_size=9)
NUMBERS = st.integers(0, 10**18 - 1)


@given(
    st.lists(st.tuples(NAMES, st.lists(st.tuples(NUMBERS, NUMBERS), max_size=5)), max_size=5), st.booleans()
)
def test_there_and_back(files, windows):
    lines = [str(len(files))]
    for name, ranges in files:
        lines += [f"{name} {len(ranges)}", *(f"{begin} {end}" for begin, end in ranges)]
    text = "\n".join(lines) + "\n"
    data = (text.replace("\n", "\r\n") if windows else text).encode()
    found = parse_tenplex_index(data)
    assert [(name, [tuple(row) for row in ranges.tolist()]) for name, ranges in found] == files
    assert all(ranges.dtype == np.int64 for _, ranges in found)
    assert len(parse_tenplex_index(data.rstrip())) == len(files)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", InvalidError, "line 1: need a count, got b''"),
        ("x\n", InvalidError, "line 1: need a count"),
        ("1\n", CorruptError, "ends after line 1, more are announced"),
        ("1\na\n", InvalidError, "line 2"),
        ("1\n 2\n", InvalidError, "line 2: need PATH COUNT"),
        ("1\na 2\n0 1\n", CorruptError, "ends after line 3"),
        ("1\na 2\n0 1 2\n3\n", InvalidError, "line 3: need BEGIN END, got b'0 1 2'"),
        ("1\na 2\n0 1\n-1 2\n", InvalidError, "line 4: need BEGIN END"),
        ("1\na 1\n0  1\n", InvalidError, "line 3"),
        ("1\na 1\n0 1.5\n", InvalidError, "line 3"),
        ("1\na 1\n0 9999999999999999999\n", InvalidError, "line 3"),
        ("1\na 1\n0 1\nmore\n", InvalidError, "line 4: nothing more is announced, got b'more'"),
    ],
)
def test_refusals_name_the_line(text, error, message):
    with pytest.raises(error, match=message):
        parse_tenplex_index(text.encode())


def test_a_path_that_is_no_utf8_stays_itself():
    ((name, _),) = parse_tenplex_index(b"1\n/\xff 0\n")
    assert name.encode("utf-8", "surrogateescape") == b"/\xff"
