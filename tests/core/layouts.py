"""Layouts at random, and an oracle for them that shares no code with the core.

The oracle works on whole index arrays: it cuts the array of all flat indices of a tensor by numpy's own
splitting and slicing, rank by rank, so that what a rank must hold is an array of indices, -1 for padding.
"""

import itertools
import json
import math

import numpy as np
from hypothesis import strategies as st

DTYPES = ["float32", "float16", "int64", "bool", "bfloat16"]


def cut_1d(indices, dim, cut, ways, coordinate):
    """Takes the part of ``coordinate`` from an index array, along ``dim``."""
    size = indices.shape[dim]
    if "cuts" in cut:
        return np.split(indices, cut["cuts"][1:-1], axis=dim)[coordinate]
    if "sections" in cut:
        parts, first = [], 0
        for section in cut["sections"]:
            width = section if isinstance(section, int) else section["width"]
            own = ways if isinstance(section, int) else section["ways"]
            run = np.take(indices, range(first, first + width), axis=dim)
            index = coordinate if own == ways else coordinate * own // ways
            parts.append(cut_1d(run, dim, {"rule": cut.get("rule", "exact")}, own, index))
            first += width
        return np.concatenate(parts, axis=dim)
    if "pad_to" in cut or "pad_multiple" in cut:
        unit = cut.get("pad_multiple", 1) * ways
        target = cut["pad_to"] if "pad_to" in cut else math.ceil(size / unit) * unit
        widths = [(0, target - size if d == dim else 0) for d in range(indices.ndim)]
        indices = np.pad(indices, widths, constant_values=-1)
        size = target
    rule = cut.get("rule", "exact")
    if rule == "ceil":
        step = math.ceil(size / ways)
        points = [min(step * k, size) for k in range(1, ways)]
        return np.split(indices, points, axis=dim)[coordinate]
    if rule == "exact":
        assert size % ways == 0
    return np.array_split(indices, ways, axis=dim)[coordinate]


def coordinate_of(mesh, axis, rank):
    names = [axis] if isinstance(axis, str) else axis
    place = dict(zip(mesh, np.unravel_index(rank, list(mesh.values())), strict=True))
    value = 0
    for name in names:
        value = value * mesh[name] + int(place[name])
    return value, math.prod(mesh[name] for name in names)


def exists(entry, mesh, rank, values):
    for axis, where in entry.get("on", {}).items():
        coordinate, size = coordinate_of(mesh, axis, rank)
        if isinstance(where, dict):
            where = where["owner"][values[where["by"]]]
        if coordinate not in [c % size for c in ([where] if isinstance(where, int) else where)]:
            return False
    return True


def held(document, rank):
    """Returns what ``rank`` must hold: {path: array of flat indices of the tensor, -1 for padding}."""
    out = {}
    for key, entry in document["tensors"].items():
        if "alias" in entry:
            entry = {**document["tensors"][entry["alias"]], **entry}
        mesh = document["meshes"][entry["mesh"]] if "mesh" in entry else document["mesh"]
        count = entry.get("count", {})
        count = {"i": count} if isinstance(count, int) else count
        for numbers in itertools.product(*(range(n) for n in count.values())):
            values = dict(zip(count, numbers, strict=True))
            if not exists(entry, mesh, rank, values):
                continue
            indices = np.arange(math.prod(entry["shape"])).reshape(entry["shape"])
            for cut in entry.get("shard", []):
                coordinate, ways = coordinate_of(mesh, cut["axis"], rank)
                if cut.get("flat"):
                    unit = math.lcm(cut.get("pad_to_multiple", 1), ways)
                    flat = indices.ravel()
                    pad = math.ceil(len(flat) / unit) * unit - len(flat)
                    indices = np.split(np.pad(flat, (0, pad), constant_values=-1), ways)[coordinate]
                else:
                    indices = cut_1d(indices, cut["dim"], cut, ways, coordinate)
            out[key.format(**values)] = indices
    for group in document.get("flat_groups", {}).values():
        out |= held_of_group(group, document["mesh"], rank, out)
    return out


def held_of_group(group, mesh, rank, shards):
    """Joins the members' raveled shards as (member, index) pairs, cuts the whole, sorts out who got what."""
    coordinate, ways = coordinate_of(mesh, group["axis"], rank)
    members = [path for path in group["members"] if path in shards]
    joined = []
    for number, path in enumerate(members):
        joined += [(-1, -1)] * (-len(joined) % group.get("align", 1))
        joined += [(number, index) for index in shards[path].ravel().tolist()]
    joined += [(-1, -1)] * (-len(joined) % math.lcm(group.get("pad_to_multiple", 1), ways))
    run = len(joined) // ways
    mine = joined[run * coordinate : run * (coordinate + 1)]
    return {
        path: np.array([index for number, index in mine if number == k], int)
        for k, path in enumerate(members)
    }


@st.composite
def cuts(draw, mesh, shape, axes):
    """Draws a shard list over some of ``axes``."""
    out, first = [], set()
    for axis in axes:
        size = math.prod(mesh[name] for name in ([axis] if isinstance(axis, str) else axis))
        if not shape or draw(st.booleans()):
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        cut = {"axis": axis, "dim": dim}
        fresh = dim not in first
        first.add(dim)
        kind = draw(st.sampled_from(["ceil", "balanced", "cuts", "sections", "pad_to", "pad_multiple"]))
        n = shape[dim]
        if not fresh or kind in ("ceil", "balanced"):
            cut["rule"] = kind if kind in ("ceil", "balanced") else "ceil"
        elif kind == "cuts":
            inner = sorted(draw(st.lists(st.integers(0, n), min_size=size - 1, max_size=size - 1)))
            cut["cuts"] = [0, *inner, n]
        elif kind == "sections":
            a = draw(st.integers(0, n))
            own = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
            cut |= {"sections": [a, {"width": n - a, "ways": own}], "rule": "balanced"}
        elif kind == "pad_to":
            cut |= {"pad_to": n + draw(st.integers(0, 3)), "rule": "balanced"}
        else:
            cut["pad_multiple"] = draw(st.integers(1, 3))
        out.append(cut)
    if draw(st.booleans()):
        axis = draw(st.sampled_from(list(mesh)))
        if all(axis != c["axis"] and axis not in c["axis"] for c in out):
            out.append({"axis": axis, "flat": True, "pad_to_multiple": draw(st.integers(1, 4))})
    return out


@st.composite
def meshes(draw, max_ranks=8):
    names = draw(st.permutations(["pp", "dp", "tp"]))[: draw(st.integers(1, 3))]
    mesh, size = {}, 1
    for name in names:
        mesh[name] = draw(st.integers(1, max(1, max_ranks // size)))
        size *= mesh[name]
    return mesh


@st.composite
def documents(draw, shapes, node_names=("a", "b", "c")):
    """Draws the document of a layout of tensors ``shapes``: {key: (shape, dtype)}, ``{i}`` counted 3."""
    mesh = draw(meshes())
    size = math.prod(mesh.values())
    tensors = {}
    for key, (shape, dtype) in shapes.items():
        entry = {"shape": list(shape), "dtype": dtype}
        free = list(mesh)
        if "{i}" in key:
            entry["count"] = 3
            axis = draw(st.sampled_from(free))
            free.remove(axis)
            owner = draw(st.lists(st.integers(0, mesh[axis] - 1), min_size=3, max_size=3))
            entry["on"] = {axis: {"by": "i", "owner": owner}}
        elif draw(st.booleans()):
            axis = draw(st.sampled_from(free))
            free.remove(axis)
            entry["on"] = {axis: draw(st.sampled_from([0, -1, sorted({0, mesh[axis] - 1})]))}
        if len(free) > 1 and draw(st.booleans()):
            free = [free[:2], *free[2:]]
        shard = draw(cuts(mesh, shape, free))
        on_axes = set(entry.get("on", {}))
        shard = [c for c in shard if not c.get("flat") or c["axis"] not in on_axes]
        if shard:
            entry["shard"] = shard
        tensors[key] = entry
    more = draw(extras(mesh, tensors))
    ranks = draw(st.permutations(range(size)))
    used = draw(st.lists(st.sampled_from(node_names), min_size=size, max_size=size))
    nodes = {name: [r for r, n in zip(ranks, used, strict=True) if n == name] for name in node_names}
    nodes = {name: ranks for name, ranks in nodes.items() if ranks}
    return {
        "format": "tenplexfs-layout",
        "version": 1,
        "mesh": mesh,
        "nodes": nodes,
        "tensors": tensors,
        **more,
    }


@st.composite
def extras(draw, mesh, tensors):
    """Ties a name, moves a tensor to a second mesh, groups some; returns what the document gets more."""
    more = {}
    if draw(st.booleans()):
        tensors["tied"] = {"alias": "v"}
        if draw(st.booleans()):
            tensors["tied"] |= {"on": {draw(st.sampled_from(list(mesh))): -1}}
    size = math.prod(mesh.values())
    if draw(st.booleans()):
        ways = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        more["meshes"] = {"expert": {"xdp": size // ways, "ep": ways}}
        entry = tensors["v"]
        tensors["v"] = {"shape": entry["shape"], "dtype": entry["dtype"], "mesh": "expert"}
        if entry["shape"]:
            tensors["v"]["shard"] = [{"axis": "ep", "dim": 0, "rule": "balanced"}]
        if "tied" in tensors:
            tensors["tied"].pop("on", None)
    if draw(st.booleans()):
        axis = draw(st.sampled_from(list(mesh)))
        for key in ("w", "layers/{i}/w"):
            shard = [c for c in tensors[key].get("shard", []) if not c.get("flat") and axis not in c["axis"]]
            on = {a: where for a, where in tensors[key].get("on", {}).items() if a != axis}
            tensors[key] = {k: x for k, x in tensors[key].items() if k not in ("shard", "on")}
            tensors[key] |= {"flat": "bucket", "shard": shard, "on": on}
        # A member whose stage is gone with its axis exists everywhere then.
        members = draw(st.permutations(["w", *(f"layers/{i}/w" for i in range(3))]))
        group = {"members": members, "axis": axis, "align": draw(st.integers(1, 4))}
        more["flat_groups"] = {"bucket": group | {"pad_to_multiple": draw(st.integers(1, 5))}}
    return more


@st.composite
def transitions(draw, count=2):
    """Draws ``count`` documents of the same tensors."""
    small = st.lists(st.integers(1, 6), max_size=3).map(tuple)
    shapes = {"step": ((), "int64")}
    for key in ("w", "v", "layers/{i}/w"):
        shapes[key] = (draw(small), draw(st.sampled_from(DTYPES)))
    return [draw(documents(shapes)) for _ in range(count)]


def text(document):
    return json.dumps(document)
