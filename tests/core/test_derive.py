import json

import pytest

from tenplexfs.core.build import build_ptc
from tenplexfs.core.derive import derive_layout
from tenplexfs.core.layout import place_in_order
from tenplexfs.errors import InvalidError
from tenplexfs.formats.layout_json import layout_to_json, parse_layout

TENSORS = {
    "layers/{i}/w": {
        "shape": [8, 4],
        "dtype": "float32",
        "count": 6,
        "shard": [{"axis": "tp", "dim": 0}],
        "on": {"pp": {"by": "i", "owner": [0, 0, 0, 1, 1, 1]}},
    },
    "embedding": {
        "shape": [10, 4],
        "dtype": "float32",
        "shard": [{"axis": "tp", "dim": 0, "pad_multiple": 3}],
        "on": {"pp": 0},
    },
}


CUT = {"shape": [4], "dtype": "int8", "shard": [{"axis": "tp", "dim": 0, "cuts": [0, 1, 4]}]}


def layout(tensors=TENSORS, mesh=None, **more):
    document = {
        "format": "tenplexfs-layout",
        "version": 1,
        "mesh": mesh or {"pp": 2, "tp": 2},
        "tensors": tensors,
    }
    return parse_layout(json.dumps({"nodes": {"a": [0, 1], "b": [2, 3]}, **document, **more}))


def owner(derived, key="layers/{i}/w"):
    return layout_to_json(derived)["tensors"][key]["on"]["pp"]["owner"]


def test_axes_that_are_not_named_keep_their_size_and_stages_are_split_evenly():
    derived = derive_layout(layout(), {"pp": 4, "tp": 1})
    assert derived.mesh.axes == (("pp", 4), ("tp", 1))
    assert owner(derived) == [0, 0, 1, 1, 2, 3]
    assert derive_layout(layout(), {"tp": 1}, {"a": 2}).mesh.axes == (("pp", 2), ("tp", 1))
    assert build_ptc(place_in_order(derived)).nodes == {"a": (0, 1), "b": (2, 3)}


def test_there_and_back_gives_the_same_layout():
    start = layout()
    away = derive_layout(start, {"pp": 1, "tp": 4})
    assert place_in_order(derive_layout(away, {"pp": 2, "tp": 2})) == start


def test_a_virtual_owner_keeps_its_chunks():
    virtual = {
        **TENSORS["layers/{i}/w"],
        "count": 8,
        "on": {"pp": {"by": "i", "owner": [0, 0, 1, 1, 0, 0, 1, 1]}},
    }
    derived = derive_layout(layout({"layers/{i}/w": virtual}), {"pp": 4, "tp": 1})
    assert owner(derived) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_padding_to_a_multiple_follows_and_padding_to_a_size_stays():
    derived = build_ptc(derive_layout(layout(), {"pp": 1, "tp": 4}))
    assert derived.shard(0, "embedding").local_shape == (3, 4)
    fixed = {"embedding": {**TENSORS["embedding"], "shard": [{"axis": "tp", "dim": 0, "pad_to": 12}]}}
    with pytest.raises(
        InvalidError, match=r"'embedding': dim 0: size 10, 8 ways \(axis tp\): 12 does not divide by 8"
    ):
        build_ptc(derive_layout(layout(fixed), {"pp": 1, "tp": 8}, {"a": 8}))


def test_nodes_are_given_by_devices_or_shared_evenly():
    derived = derive_layout(layout(), {"tp": 3}, {"a": None, "b": None, "c": 2})
    assert derived.devices == (("a", 2), ("b", 2), ("c", 2))


@pytest.mark.parametrize(
    ("make", "mesh", "message"),
    [
        (lambda: layout(), {"ep": 2}, "unknown axis 'ep': the mesh has pp, tp"),
        (lambda: layout(), {"tp": 4}, "nodes: 4 devices on a:2, b:2, the mesh (pp=2, tp=4) needs 8"),
        (
            lambda: layout(meshes={"expert": {"pp": 2, "ep": 2}}),
            {"tp": 1},
            "mesh 'expert' (pp=2, ep=2) has 4 ranks",
        ),
        (
            lambda: layout({"w": CUT}),
            {"tp": 1},
            "tensor 'w': dim 0: explicit cuts over tp do not follow",
        ),
        (
            lambda: layout({}, ranks=[{}, {}, {}, {}]),
            {"tp": 1},
            "explicit ranks, which no mesh can change",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make, mesh, message):
    with pytest.raises(InvalidError) as caught:
        derive_layout(make(), mesh)
    assert message in caught.value.message
