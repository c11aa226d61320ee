import numpy as np
import pytest

from tenplexfs.client.arrays import source_of
from tenplexfs.errors import CorruptError
from tenplexfs.formats.structure import flatten, unflatten
from tenplexfs.formats.values import Values, pack, regroup, unpack


def documents(*states):
    return Values({rank: flatten(state, source_of).document for rank, state in enumerate(states)})


def states(values):
    return [unflatten(values.documents[rank], lambda path: path) for rank in sorted(values.documents)]


def test_equal_documents_are_kept_once():
    values = documents({"lr": 1}, {"lr": 1}, {"lr": 2})
    back = unpack(pack(values))
    assert back == values
    assert back.documents[0] is back.documents[1] is not back.documents[2]
    assert len(pack(documents(*[{"lr": "x" * 1000}] * 50))) < 2000
    assert pack(Values()) == b"" and unpack(b"") == Values()
    assert unpack(pack(Values(consumed=5))).consumed == 5
    with pytest.raises(CorruptError):
        unpack(b"\x81")


def test_new_ranks_go_on_with_values_of_old_ones_modulo_their_number():
    old = documents({"seed": 10, "w": np.ones(1)}, {"seed": 11, "w": np.ones(1)})
    assert states(regroup(old, [("w",)] * 5)) == [{"seed": 10 + r % 2, "w": "w"} for r in range(5)]
    assert states(regroup(old, [("w",)])) == [{"seed": 10, "w": "w"}]


def test_stages_are_joined_and_parted():
    def stage(*layers):
        state = {"layers": {f"{i}": {"w": np.ones(1), "kind": f"k{i}"} for i in layers}, "iteration": 7}
        state["opt"] = {"state": {i: {"m": np.ones(1), "step": 3} for i in layers}, "groups": [{"lr": 0.1}]}
        return state

    def paths(*layers):
        return tuple(p for i in layers for p in (f"layers/{i}/w", f"opt/state/{i}/m"))

    def named(*layers):
        return {
            "layers": {f"{i}": {"w": f"layers/{i}/w", "kind": f"k{i}"} for i in layers},
            "iteration": 7,
            "opt": {
                "state": {i: {"m": f"opt/state/{i}/m", "step": 3} for i in layers},
                "groups": [{"lr": 0.1}],
            },
        }

    two = documents(stage(0, 1), stage(2, 3))
    assert states(regroup(two, [paths(0, 1, 2, 3)])) == [named(0, 1, 2, 3)]
    four = regroup(two, [paths(i) for i in range(4)])
    found = states(four)
    for i in range(4):
        assert found[i]["layers"][f"{i}"] == named(i)["layers"][f"{i}"]
        assert found[i]["opt"]["state"][i] == {"m": f"opt/state/{i}/m", "step": 3}
        assert found[i]["iteration"] == 7


def test_ties_outlive_the_rank_that_had_the_first_name():
    w = np.ones(1)
    old = documents({"emb": w, "head": w, "third": w})
    (found,) = states(regroup(old, [("head", "third")]))
    assert found == {"head": "head", "third": "head"}


def test_ranks_that_go_leave_what_they_alone_have():
    old = documents({"a": 1, "rng": "0"}, {"b": {"c": 2}, "rng": "1"}, {"a": 3, "d": 4}, {"b": {"e": 5}})
    assert states(regroup(old, [()] * 2)) == [
        {"a": 1, "rng": "0", "d": 4},
        {"b": {"c": 2, "e": 5}, "rng": "1"},
    ]
    assert states(regroup(old, [()])) == [{"a": 1, "rng": "0", "b": {"c": 2, "e": 5}, "d": 4}]


def test_nothing_is_added_where_nothing_changes():
    old = documents({"a": {"b": 1}, "empty": {}, "w": np.ones(1), "s": [np.ones(1), 2]})
    assert regroup(old, [("w", "s/0")]) == old
