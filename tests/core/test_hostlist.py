from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplexfs.core.hostlist import expand_hostlist
from tenplexfs.errors import InvalidError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node0", ["node0"]),
        ("a,b", ["a", "b"]),
        ("n[01-03,07]", ["n01", "n02", "n03", "n07"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]-ib", ["n098-ib", "n099-ib", "n100-ib", "n101-ib"]),
        ("r[1-2]n[1,3],x", ["r1n1", "r1n3", "r2n1", "r2n3", "x"]),
        ("a,a,n[1-2],n2", ["a", "n1", "n2"]),
    ],
)
def test_as_scontrol_shows_them(text, hosts):
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,,b",
        "n[",
        "n[1-]",
        "n[3-1]",
        "n[a]",
        "n[[1]]",
        "n]",
        "a b",
        "n[1-999999999]",
        "n[0-999]m[0-999]",
    ],
)
def test_what_is_no_list_is_refused(text):
    with pytest.raises(InvalidError, match="hosts"):
        expand_hostlist(text)


@given(st.text(alphabet="n0123[],-. ", max_size=30))
def test_anything(text):
    try:
        hosts = expand_hostlist(text)
    except InvalidError as error:
        assert "\n" not in error.message
    else:
        assert hosts and len(set(hosts)) == len(hosts)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.integers(1, 4))
def test_every_number_is_there_once(numbers, width):
    text = "n[" + ",".join(str(n).zfill(width) for n in numbers) + "]"
    assert expand_hostlist(text) == list(dict.fromkeys(f"n{str(n).zfill(width)}" for n in numbers))
