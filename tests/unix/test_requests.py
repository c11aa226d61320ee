import pytest

from tenplexfs.errors import InvalidError
from tenplexfs.unix.requests import save_request

GOOD = {
    "op": "save.begin",
    "job": "gpt",
    "rank": 0,
    "step": 1,
    "snapshot": None,
    "process": "1-a",
    "run": "",
    "tensors": [["w", "float32", [2, 3]], ["v", "float32", [2, 3]]],
    "ties": {"v": "w"},
    "document": b"{}",
    "consumed": None,
}


def test_a_good_one():
    found = save_request(GOOD)
    assert (found.tensors[0], found.ties) == (("w", "float32", (2, 3)), {"v": "w"})


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("job", "../x", "job name"),
        ("job", None, "job: need str"),
        ("rank", -1, "rank: need int"),
        ("rank", True, "rank: need int"),
        ("step", "1", "step: need int"),
        ("tensors", [["w", "float32"]], "need path, dtype and shape"),
        ("tensors", [["w", "float33", [1]]], "float33"),
        ("tensors", [["w", "float32", [-1]]], "need path, dtype and shape"),
        ("tensors", [["w", "float32", [1] * 65]], "need path, dtype and shape"),
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
