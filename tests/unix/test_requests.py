import pytest

from tenplexfs.errors import InvalidError
from tenplexfs.runtime.save_parts import Tensors
from tenplexfs.unix.requests import save_request, sums_of

GOOD = {
    "op": "save.begin",
    "job": "gpt",
    "rank": 0,
    "step": 1,
    "snapshot": None,
    "process": "1-a",
    "run": "",
    "paths": ["w", "v"],
    "kinds": [["int8", []], ["float32", [2, 3]]],
    "of": b"\1\0\0\0\1\0\0\0",
    "ties": {"v": "w"},
    "document": b"{}",
    "consumed": None,
}


def test_a_good_one():
    found = save_request(GOOD)
    kinds = [("int8", ()), ("float32", (2, 3))]
    assert found.tensors == Tensors(["w", "v"], kinds, [1, 1], {"v": "w"})


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("job", "../x", "job name"),
        ("job", None, "job: need str"),
        ("rank", -1, "rank: need int"),
        ("rank", True, "rank: need int"),
        ("step", "1", "step: need int"),
        ("paths", None, "paths: need list"),
        ("paths", ["w", 5], "paths: need texts"),
        ("paths", ["w"], "a kind, as uint32, for each of 1 paths"),
        ("kinds", [["int8", []]], "a kind, as uint32, for each of 2 paths"),
        ("kinds", [["float32"], ["int8", []]], "need dtype and shape"),
        ("kinds", [["float33", [1]], ["int8", []]], "float33"),
        ("kinds", [["float32", [-1]], ["int8", []]], "need dtype and shape"),
        ("kinds", [["float32", [1] * 65], ["int8", []]], "need dtype and shape"),
        ("of", b"\0\0\0\0\0", "a kind, as uint32, for each of 2 paths"),
        ("of", b"\0\0\0\0\2\0\0\0", "a kind, as uint32, for each of 2 paths"),
        ("ties", {"w": "w"}, "tie of"),
        ("ties", {"x": "w"}, "tie of"),
        ("ties", {"v": "x"}, "tie of"),
        ("document", "text", "document: need bytes"),
        ("snapshot", 5, "snapshot: need str"),
    ],
)
def test_each_field_is_checked(name, value, why):
    with pytest.raises(InvalidError, match=why):
        save_request({**GOOD, name: value})


def test_sums_that_a_client_has_made():
    message = {"op": "save.seal", "sums": bytes(8) + b"\7" + bytes(7), "summed": b"\0\1"}
    assert sums_of(message, 2) == {1: 7}
    assert sums_of({"op": "save.seal"}, 2) == {}  # of a client without the library
    for wrong in ({"sums": b"\0" * 15}, {"summed": b"\1"}, {"sums": b""}):
        with pytest.raises(InvalidError, match="for 2 tensors"):
            sums_of({**message, **wrong}, 2)
    with pytest.raises(InvalidError, match="need bytes"):
        sums_of({**message, "summed": [1, 1]}, 2)
    assert sums_of({**message, "sums": None}, 2) == {}
