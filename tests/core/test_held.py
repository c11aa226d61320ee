"""Entries that are joined say of every tensor what they said one by one."""

from __future__ import annotations

from itertools import product

import pytest

from tenplexfs.core.build import build_ptc
from tenplexfs.core.held import counted
from tenplexfs.core.layout import Cut, Layout, Mesh, TensorEntry

MESH = Mesh((("pp", 2), ("tp", 2)))
CUT = (Cut(("tp",), 0),)
FIRST = ((("pp",), (0,)),)


def entry(key: str, shape: tuple[int, ...] = (4,), **more) -> TensorEntry:
    return TensorEntry(key, shape, "float32", **more)


@pytest.mark.parametrize(
    ("keys", "joined"),
    [
        ([f"layers/{i}/w" for i in range(12)], {"layers/{i}/w": {"i": 12}}),
        ([f"{i}/{j}" for i, j in product(range(3), range(2))], {"{i}/{j}": {"i": 3, "j": 2}}),
        (["a/0", "a/2"], {"a/0": {}, "a/2": {}}),  # one is left out
        (["a/0/0", "a/1/1"], {"a/0/0": {}, "a/1/1": {}}),
        (["a/0", "a/00", "a/\u0661", "a/x"], {"a/0": {}, "a/00": {}, "a/\u0661": {}, "a/x": {}}),
        (["a/" + "0/" * 9 + str(i) for i in range(2)], {f"a/{'0/' * 9}{i}": {} for i in range(2)}),
        ([], {}),
    ],
)
def test_what_is_joined_is_the_same_tensors(keys, joined):
    alone = [entry(key) for key in keys]
    found = counted(alone)
    assert {each.key: dict(each.count) for each in found} == joined
    if keys:
        one, other = (build_ptc(Layout(MESH, tuple(each))) for each in (alone, found))
        assert one.tensors == other.tensors
        assert [*map(one.rank_paths, one.ranks())] == [*map(other.rank_paths, other.ranks())]


def test_what_differs_otherwise_is_not_joined():
    layers = [
        entry("layers/0/w", shard=CUT),
        entry("layers/1/w", shard=CUT),
        entry("layers/2/w"),
        entry("layers/0/v", on=FIRST),
        entry("layers/1/v"),
        entry("layers/0/u", (4,)),
        entry("layers/1/u", (2,)),
    ]
    found = counted(layers)
    assert [each for each in found if each.count] == [
        entry("layers/{i}/w", shard=CUT, count=(("i", 2),)),
    ]
    assert len(found) == 6
