"""The setting ``parallelizer`` of a job, and what a parallelizer that is a program reads and writes.

Tables are read in our own form, ``{"16": {"tp": 2, "pp": 4, "dp": 2}}``, and as Tenplex writes them:
``{"16": {"mp_size": 2, "pp_size": 4, "dp_size": 2}}``, or with ``size`` in the place of ``dp_size``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import msgspec

from tenplexfs.core.cost import Devices
from tenplexfs.core.parallelizers import Answer, Auto, Command, Committed, Parallelizer, Proposal, Table
from tenplexfs.core.presets import PRESETS, Transformer
from tenplexfs.errors import InvalidError
from tenplexfs.formats.explicit_json import convert
from tenplexfs.formats.text import parse_bandwidth

__all__ = ["MAX_ANSWER_BYTES", "parse_answer", "parse_parallelizer", "resources_text"]

MAX_ANSWER_BYTES = 1 << 26

_KINDS = ("table", "command", "auto")
_MAX_ROWS = 10_000
_MAX_RANKS = 1 << 17
_DEVICES = Devices()
_DEGREES = ("tp", "pp", "dp")
_TENPLEX = {"mp_size": "tp", "pp_size": "pp", "dp_size": "dp"}


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    rows: dict[str, dict[str, int]]


class _Command(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    argv: list[str]
    timeout_s: float = 60.0


class _Model(msgspec.Struct, forbid_unknown_fields=True):
    layers: int
    hidden: int
    heads: int
    vocab: int
    kv_heads: int | None = None
    ffn: int | None = None
    positions: int = 0
    gated: bool = False
    is_tied: bool = True


class _Auto(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    kind: str
    model: str | _Model
    axes: dict[str, str] = {}
    global_batch: int | None = None
    sequence: int = 2048
    micro_batch: int = 1
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    zero: bool = False
    recompute: Literal["none", "selective", "full"] = "selective"
    memory_bytes: float = _DEVICES.memory_bytes
    memory_fraction: float = _DEVICES.memory_fraction
    flops_per_s: float = _DEVICES.flops_per_s
    intra_node: float | str = _DEVICES.intra_node_bytes_per_s
    inter_node: float | str = _DEVICES.inter_node_bytes_per_s
    latency_s: float = _DEVICES.latency_s


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    mesh: dict[str, int] | None = None
    keep_together: list[str] = []
    pause: str | None = None


def parse_parallelizer(setting: object) -> Parallelizer | Command:
    """Returns what the setting stands for.

    >>> parse_parallelizer({"kind": "table", "rows": {"4": {"tp": 2, "pp": 2}}})
    Table(rows={4: {'tp': 2, 'pp': 2}})

    Raises:
        InvalidError: It is refused; one line.
    """
    what = "setting 'parallelizer'"
    if not isinstance(setting, dict) or setting.get("kind") not in _KINDS:
        raise InvalidError(f'{what}: need an object with "kind", one of {", ".join(_KINDS)}')
    if setting["kind"] == "table":
        return Table(_rows(what, convert(what, setting, _Table).rows))
    if setting["kind"] == "command":
        command = convert(what, setting, _Command)
        if not command.argv or not command.argv[0].startswith("/") or "\0" in "".join(command.argv):
            raise InvalidError(f"{what}: argv: need the absolute path of a program first, got {command.argv}")
        if not 0 < command.timeout_s <= 3600:
            raise InvalidError(f"{what}: timeout_s: need > 0 and at most 3600, got {command.timeout_s}")
        return Command(tuple(command.argv), command.timeout_s)
    return _auto(what, convert(what, setting, _Auto))


def resources_text(
    job: str, committed: Committed, layout_json: bytes, nodes: Mapping[str, int], step: int | None
) -> bytes:
    """Returns what a program is told on its standard input."""
    content = {
        "format": "tenplexfs-resources",
        "version": 1,
        "job": job,
        "step": step,
        "nodes": dict(nodes),
        "devices": sum(nodes.values()),
        "mesh": dict(committed.mesh),
        "global_batch": committed.global_batch,
    }
    return json.dumps(content).encode()[:-1] + b', "layout": ' + layout_json + b"}"


def parse_answer(text: bytes) -> Answer:
    """Returns what a program wrote: a layout, a mesh, degrees as in a table, or ``{"pause": "why"}``.

    Raises:
        InvalidError: It is none of these.
    """
    what = "parallelizer: command: its answer"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidError(f"{what}: no valid JSON: {error}") from error
    if isinstance(content, list) or (isinstance(content, dict) and "format" in content):
        return Answer((Proposal({}, (), text),))
    if not isinstance(content, dict) or not content:
        raise InvalidError(f'{what}: need a layout, {{"mesh": {{...}}}}, degrees or {{"pause": "why"}}')
    if not content.keys() & {"mesh", "pause"}:
        proposal = Proposal(_degrees(what, content))
        return Answer((proposal,))
    given = convert(what, content, _Given)
    if given.pause is not None:
        return Answer((), " ".join(given.pause[:1000].split()) or "no reason given")
    if given.mesh is None:
        raise InvalidError(f"{what}: mesh: is not given")
    return Answer((Proposal(_sizes(what, given.mesh), tuple(given.keep_together)),))


def _rows(what: str, rows: Mapping[str, Mapping[str, int]]) -> dict[int, dict[str, int]]:
    if not rows or len(rows) > _MAX_ROWS:
        raise InvalidError(f"{what}: rows: need 1 to {_MAX_ROWS}, got {len(rows)}")
    found: dict[int, dict[str, int]] = {}
    for key, row in rows.items():
        where = f"{what}: row {key!r}"
        if not (key.isascii() and key.isdecimal() and 0 < int(key) <= _MAX_RANKS) or int(key) in found:
            raise InvalidError(f"{where}: need a number of devices, each once")
        mesh = _degrees(where, row)
        size = 1
        for ways in mesh.values():
            size *= ways
        if int(key) % size or (row.keys() & _TENPLEX.keys() and int(key) != size):
            raise InvalidError(f"{where}: its degrees {mesh} give {size} ranks")
        found[int(key)] = mesh
    return found


def _degrees(what: str, row: Mapping[str, Any]) -> dict[str, int]:
    """Returns axis -> size of a row, in our words or in Tenplex's."""
    if not (row.keys() & {"mp_size", "pp_size", "dp_size", "size"}):
        return _sizes(what, row)
    sizes = _sizes(what, row)
    total = sizes.pop("size", None)
    unknown = [name for name in sizes if name not in _TENPLEX]
    if unknown:
        raise InvalidError(f"{what}: {unknown[0]!r} beside {', '.join(_TENPLEX)}")
    mesh = {_TENPLEX[name]: size for name, size in sizes.items()}
    if total is not None:
        rest = mesh.get("tp", 1) * mesh.get("pp", 1)
        if total % rest or mesh.get("dp", total // rest) != total // rest:
            raise InvalidError(f"{what}: size {total} is not that of {mesh}")
        mesh["dp"] = total // rest
    return mesh


def _sizes(what: str, mesh: Mapping[str, Any]) -> dict[str, int]:
    if not mesh:
        raise InvalidError(f"{what}: no axis is given")
    for axis, size in mesh.items():
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _MAX_RANKS:
            raise InvalidError(f"{what}: {axis}: need a whole number from 1 to {_MAX_RANKS}, got {size!r}")
    return dict(mesh)


def _auto(what: str, given: _Auto) -> Auto:
    training = {
        name: getattr(given, name)
        for name in ("sequence", "micro_batch", "gradient_bytes", "optimizer_bytes", "zero", "recompute")
    }
    if given.global_batch is not None:
        training["global_batch"] = given.global_batch
    names = [given.axes.get(axis, axis) for axis in _DEGREES]
    if given.axes.keys() - set(_DEGREES) or len(set(names)) < len(names):
        raise InvalidError(f"{what}: axes: need a name of its own for tp, pp and dp, got {given.axes}")
    try:
        devices = Devices(
            memory_bytes=given.memory_bytes,
            memory_fraction=given.memory_fraction,
            flops_per_s=given.flops_per_s,
            intra_node_bytes_per_s=_rate(given.intra_node),
            inter_node_bytes_per_s=_rate(given.inter_node),
            latency_s=given.latency_s,
        )
        auto = Auto(_model(given.model), devices, training, given.axes)
        auto.training_of(Committed({}, given.global_batch or given.micro_batch))
    except InvalidError as error:
        raise InvalidError(f"{what}: {error}") from None
    return auto


def _rate(given: float | str) -> float:
    return parse_bandwidth(given) if isinstance(given, str) else given


def _model(given: str | _Model) -> Transformer:
    if isinstance(given, str):
        found = PRESETS.get(given)
        if found is None or found.experts:
            dense = [name for name, model in PRESETS.items() if model is not None and not model.experts]
            raise InvalidError(
                f"model {given!r}: need one of {', '.join(dense)}, or an object with its sizes"
            )
        return found
    sizes: dict[str, Any] = {
        "layers": given.layers,
        "hidden": given.hidden,
        "heads": given.heads,
        "vocab": given.vocab,
        "kv_heads": given.heads if given.kv_heads is None else given.kv_heads,
        "ffn": 4 * given.hidden if given.ffn is None else given.ffn,
    }
    for name, size in sizes.items():
        if not 1 <= size <= 1 << 30:
            raise InvalidError(f"model: {name}: need a whole number from 1 to {1 << 30}, got {size}")
    if given.hidden % given.heads:
        raise InvalidError(f"model: heads {given.heads} do not divide hidden {given.hidden}")
    if not 0 <= given.positions <= 1 << 30:
        raise InvalidError(f"model: positions: need 0 to {1 << 30}, got {given.positions}")
    return replace(Transformer(**sizes), positions=given.positions, gated=given.gated, is_tied=given.is_tied)
