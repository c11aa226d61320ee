"""The layout JSON (format ``tenplexfs-layout``, version 1): reading, writing, and its digest."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from tenplexfs.core.layout import (
    Axis,
    ByIndex,
    Cut,
    Dataset,
    Explicit,
    FlatCut,
    FlatGroup,
    Layout,
    Mesh,
    Section,
    TensorEntry,
)
from tenplexfs.core.snapshot import NodeName
from tenplexfs.errors import InvalidError
from tenplexfs.formats.explicit_json import as_path, convert, leaf_json, read_leaves

__all__ = ["layout_digest", "layout_text", "layout_to_json", "parse_layout"]

_FORMAT, _VERSION = "tenplexfs-layout", 1
_MAX_CHAIN = 100


class _Section(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    width: int
    ways: int | None = None


class _Shard(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    axis: str | list[str]
    dim: int | None = None
    rule: Literal["exact", "ceil", "balanced"] = "exact"
    cuts: list[int] | None = None
    sections: list[int | _Section] | None = None
    pad_to: int | None = None
    pad_multiple: int | None = None
    flat: bool = False
    pad_to_multiple: int | None = None


class _ByIndex(msgspec.Struct, forbid_unknown_fields=True):
    by: str
    owner: list[int | list[int]]


class _Tensor(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    shape: list[int] | None = None
    dtype: str | None = None
    shard: list[_Shard] | None = None
    on: dict[str, int | list[int] | _ByIndex] | None = None
    mesh: str | None = None
    count: int | dict[str, int] | None = None
    flat: str | None = None
    like: str | None = None
    then: list[_Shard] | None = None
    alias: str | None = None


class _Group(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    members: list[str]
    axis: str | list[str]
    align: int = 1
    pad_to_multiple: int = 1


class _Dataset(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    axis: str | list[str]
    global_batch: int
    uneven: Literal["balanced"] | None = None
    tail: Literal["drop", "keep"] | None = None
    context: dict[str, Any] | None = None


class _Layout(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, rename={"shapes": "global"}):
    format: Literal["tenplexfs-layout"]
    version: Literal[1]
    mesh: dict[str, int] | None = None
    meshes: dict[str, dict[str, int]] = {}
    nodes: dict[str, int | list[int]] = {}
    keep_together: list[str] = []
    tensors: dict[str, msgspec.Raw] = {}
    flat_groups: dict[str, _Group] = {}
    ranks: list[dict[str, Any]] | None = None
    shapes: dict[str, list[int]] = {}
    dataset: _Dataset | None = None


def parse_layout(
    text: str | bytes,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> Layout:
    """Reads a layout.

    Args:
        text: JSON. A bare list is the explicit form as Tenplex writes it.
        shapes: Global shapes of tensors that the explicit form does not give itself.
        dtypes: Likewise their element types.

    Raises:
        InvalidError: It is no JSON, names something twice, or does not fit the format; one line.
    """
    raw = _load(text)
    if isinstance(raw, list):
        raw = {"format": _FORMAT, "version": _VERSION, "ranks": raw}
    if not isinstance(raw, dict):
        raise InvalidError(f"layout: need a JSON object, got {type(raw).__name__}")
    tensors = raw.pop("tensors", {})
    if not isinstance(tensors, dict):
        raise InvalidError("layout: tensors: need an object")
    layout = convert("layout", raw, _Layout)
    if layout.mesh is None and layout.ranks is None:
        raise InvalidError("layout: mesh: is not given")
    mesh = layout.mesh if layout.mesh is not None else {"rank": len(layout.ranks or ())}
    explicit = None
    if layout.ranks is not None:
        known = {as_path(k): tuple(v) for k, v in {**(shapes or {}), **layout.shapes}.items()}
        ranks = tuple(
            dict(read_leaves(f"layout: rank {r}", tree, dtypes or {})) for r, tree in enumerate(layout.ranks)
        )
        explicit = Explicit(ranks, known)
    devices = tuple((NodeName(n), v) for n, v in layout.nodes.items() if isinstance(v, int))
    nodes = tuple((NodeName(n), tuple(v)) for n, v in layout.nodes.items() if not isinstance(v, int))
    if devices and nodes:
        raise InvalidError(
            f"layout: nodes: {devices[0][0]} gives a number, {nodes[0][0]} ranks: give one or the other"
        )
    return Layout(
        Mesh(tuple(mesh.items())),
        _entries(tensors),
        nodes=nodes,
        devices=devices,
        keep_together=tuple(layout.keep_together),
        meshes=tuple((name, Mesh(tuple(axes.items()))) for name, axes in layout.meshes.items()),
        flat_groups=tuple(
            FlatGroup(name, tuple(map(as_path, g.members)), _axis(g.axis), g.align, g.pad_to_multiple)
            for name, g in layout.flat_groups.items()
        ),
        explicit=explicit,
        dataset=_dataset(layout.dataset),
    )


def _load(text: str | bytes) -> Any:  # noqa: ANN401 - JSON of any shape
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            names = [name for name, _ in pairs]
            raise InvalidError(f"layout: {next(n for n in names if names.count(n) > 1)!r} is given twice")
        return out

    try:
        raw = json.loads(text, object_pairs_hook=unique)
        if ("\\ud" if isinstance(text, str) else b"\\ud") in text.lower():  # type: ignore[operator]
            # no file or message can carry half of a surrogate pair
            json.dumps(raw, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        bad = error.object[max(0, error.start - 20) : error.end]
        raise InvalidError(f"layout: half a surrogate pair is no UTF-8 text: {bad!r}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidError(f"layout: no valid JSON: {error}") from None
    return raw


def _axis(axis: str | list[str]) -> Axis:
    return (axis,) if isinstance(axis, str) else tuple(axis)


def _dataset(given: _Dataset | None) -> Dataset | None:
    if given is None:
        return None
    if given.global_batch < 1:
        raise InvalidError(f"dataset: global_batch: need >= 1, got {given.global_batch}")
    return Dataset(_axis(given.axis), given.global_batch, given.uneven, given.tail, given.context)


def _entries(tensors: Mapping[str, Any]) -> tuple[TensorEntry, ...]:
    given = {as_path(key): convert(f"tensor {key!r}", raw, _Tensor) for key, raw in tensors.items()}
    if len(given) < len(tensors):
        same = Counter(map(as_path, tensors)).most_common(1)[0][0]
        keys = " and ".join(repr(key) for key in tensors if as_path(key) == same)
        raise InvalidError(f"tensors: {keys} are one path: a dot is read as a slash")
    return tuple(_entry(key, _resolved(key, given, ())) for key in given)


def _resolved(key: str, given: Mapping[str, _Tensor], seen: tuple[str, ...]) -> _Tensor:
    """Returns the entry with what it takes over by ``like`` or ``alias``."""
    if len(seen) > _MAX_CHAIN:
        raise InvalidError(f"tensor {seen[0]!r}: like and alias go through more than {_MAX_CHAIN} entries")
    if key in seen:
        raise InvalidError(f"tensor {seen[0]!r}: like and alias go in a circle: {' -> '.join([*seen, key])}")
    own = given[key]
    if own.like is not None and own.alias is not None:
        raise InvalidError(f"tensor {key!r}: give like or alias, not both")
    name = own.like if own.like is not None else own.alias
    shard = own.shard
    if name is not None:
        base_key = as_path(name)
        if base_key not in given:
            raise InvalidError(f"tensor {key!r}: like {name!r}: no such entry")
        base = _resolved(base_key, given, (*seen, key))
        own = msgspec.structs.replace(
            base,
            **{
                f: getattr(own, f)
                for f in ("shape", "dtype", "on", "mesh", "count", "flat")
                if getattr(own, f) is not None
            },
            alias=base_key if own.alias is not None else None,
            shard=shard if shard is not None else base.shard,
            then=own.then,
        )
    if own.then is not None:
        own = msgspec.structs.replace(own, shard=[*(own.shard or []), *own.then], then=None)
    return own


def _entry(key: str, given: _Tensor) -> TensorEntry:
    what = f"tensor {key!r}"
    if given.shape is None or given.dtype is None:
        raise InvalidError(f"{what}: {'shape' if given.shape is None else 'dtype'}: is not given")
    count = given.count if given.count is not None else {}
    if isinstance(count, int):
        count = {"i": count}
    for index, size in count.items():
        if size < 0:
            raise InvalidError(f"{what}: count of {index!r}: need >= 0, got {size}")
    try:
        return TensorEntry(
            key,
            tuple(given.shape),
            given.dtype,
            tuple(_shard(shard) for shard in given.shard or ()),
            tuple(((axis,), _where(where)) for axis, where in (given.on or {}).items()),
            given.mesh,
            tuple(count.items()),
            given.flat,
            given.alias,
        )
    except InvalidError as error:
        raise InvalidError(error.message if what in error.message else f"{what}: {error}") from None


def _shard(given: _Shard) -> Cut | FlatCut:
    boxed = ("dim", "cuts", "sections", "pad_to", "pad_multiple")
    if given.flat:
        extra = [name for name in boxed if getattr(given, name) is not None]
        if extra or given.rule != "exact":
            raise InvalidError(f"shard: flat takes no {' or '.join(extra or ['rule'])}")
        return FlatCut(_axis(given.axis), given.pad_to_multiple if given.pad_to_multiple is not None else 1)
    if given.dim is None or given.pad_to_multiple is not None:
        raise InvalidError(
            "shard: dim: is not given" if given.dim is None else "shard: pad_to_multiple goes with flat"
        )
    sections = None
    if given.sections is not None:
        sections = tuple(
            Section(s) if isinstance(s, int) else Section(s.width, s.ways) for s in given.sections
        )
    cuts = None if given.cuts is None else tuple(given.cuts)
    return Cut(_axis(given.axis), given.dim, given.rule, cuts, sections, given.pad_to, given.pad_multiple)


def _where(where: int | list[int] | _ByIndex) -> tuple[int, ...] | ByIndex:
    if isinstance(where, _ByIndex):
        return ByIndex(where.by, tuple((o,) if isinstance(o, int) else tuple(o) for o in where.owner))
    return (where,) if isinstance(where, int) else tuple(where)


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """Returns the JSON object of ``layout``: ``like`` and ``then`` are written out, defaults left out."""
    out: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "mesh": dict(layout.mesh.axes)}
    if layout.meshes:
        out["meshes"] = {name: dict(mesh.axes) for name, mesh in layout.meshes}
    if layout.nodes:
        out["nodes"] = {node: list(ranks) for node, ranks in layout.nodes}
    if layout.devices:
        out["nodes"] = dict(layout.devices)
    if layout.keep_together:
        out["keep_together"] = list(layout.keep_together)
    if layout.tensors:
        out["tensors"] = {entry.key: _entry_json(entry) for entry in layout.tensors}
    if layout.flat_groups:
        out["flat_groups"] = {
            g.name: _plain(_Group(list(g.members), _axis_json(g.axis), g.align, g.pad_to_multiple))
            for g in layout.flat_groups
        }
    if layout.explicit is not None:
        out["ranks"] = [
            {path: leaf_json(leaf) for path, leaf in sorted(rank.items())} for rank in layout.explicit.ranks
        ]
        out["global"] = {path: list(shape) for path, shape in sorted(layout.explicit.shapes.items())}
    if layout.dataset is not None:
        d = layout.dataset
        context = None if d.context is None else dict(d.context)
        out["dataset"] = _plain(_Dataset(_axis_json(d.axis), d.global_batch, d.uneven, d.tail, context))  # type: ignore[arg-type]
    return out


def _plain(struct: msgspec.Struct) -> Any:  # noqa: ANN401 - JSON
    return msgspec.to_builtins(struct)


def _axis_json(axis: Axis) -> str | list[str]:
    return axis[0] if len(axis) == 1 else list(axis)


def _entry_json(entry: TensorEntry) -> Any:  # noqa: ANN401 - JSON
    on = {
        axis[0]: _ByIndex(where.by, [o[0] if len(o) == 1 else list(o) for o in where.owner])
        if isinstance(where, ByIndex)
        else (where[0] if len(where) == 1 else list(where))
        for axis, where in entry.on
    }
    shard = [_shard_json(cut) for cut in entry.shard]
    tied = entry.alias is not None  # what a tied entry leaves out it takes from the other, so all is said
    return _plain(
        _Tensor(
            list(entry.shape),
            entry.dtype,
            shard if shard or tied else None,
            on if on or tied else None,
            entry.mesh,
            dict(entry.count) or None,
            entry.flat,
            alias=entry.alias,
        )
    )


def _shard_json(cut: Cut | FlatCut) -> _Shard:
    if isinstance(cut, FlatCut):
        multiple = cut.pad_to_multiple if cut.pad_to_multiple != 1 else None
        return _Shard(_axis_json(cut.axis), flat=True, pad_to_multiple=multiple)
    sections: list[int | _Section] | None = None
    if cut.sections is not None:
        sections = [s.width if s.ways is None else _Section(s.width, s.ways) for s in cut.sections]
    cuts = None if cut.cuts is None else list(cut.cuts)
    return _Shard(_axis_json(cut.axis), cut.dim, cut.rule, cuts, sections, cut.pad_to, cut.pad_multiple)


def layout_text(layout: Layout) -> bytes:
    """Returns the JSON of ``layout`` as people and machines exchange it, ended by a newline."""
    return msgspec.json.format(msgspec.json.encode(layout_to_json(layout)), indent=1) + b"\n"


def layout_digest(layout: Layout) -> str:
    """Returns 32 hex digits that tell what ``layout`` says, whatever the order of its entries and nodes."""
    document = layout_to_json(layout)
    for name in ("mesh", "meshes"):  # the order of axes says which rank is where
        document[name] = json.dumps(document.get(name))
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:32]
