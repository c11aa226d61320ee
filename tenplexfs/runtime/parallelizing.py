"""Asking what decides: a program, or `core.parallelizers`, and making a target of the answer."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import trio

from tenplexfs.core.cost import fits_on_nodes
from tenplexfs.core.layout import Layout
from tenplexfs.core.parallelizers import Answer, Command, Committed, Parallelizer, Proposal, same_on_nodes
from tenplexfs.core.snapshot import NodeName
from tenplexfs.errors import InvalidError, TimedOutError
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.formats.parallelizer_json import MAX_ANSWER_BYTES, resources_text
from tenplexfs.runtime.planning import Target, resolve

__all__ = ["Decision", "ask_program", "decide", "held_devices", "question"]

_MAX_TRIED = 64
_STDERR_BYTES = 4096
_CHUNK_BYTES = 1 << 16
_LEFT_S = 1.0


@dataclass(frozen=True)
class Decision:
    """What a job becomes on some nodes.

    Attributes:
        target: Its layout; None when it pauses.
        why: It does.
    """

    target: Target | None
    why: str = ""


def question(job: str, layout_json: bytes, nodes: Mapping[str, int], step: int | None) -> bytes:
    """Returns what a program is told; for `runtime.compute`, as parsing may take long."""
    return resources_text(job, _committed(parse_layout(layout_json)), layout_json, nodes, step)


def held_devices(layout_json: bytes) -> dict[NodeName, int]:
    """Returns how many ranks each node of a committed layout has; for `runtime.compute`."""
    return {node: len(ranks) for node, ranks in parse_layout(layout_json).nodes if ranks}


def decide(
    asked: Parallelizer | Answer | None,
    layout_json: bytes,
    nodes: Mapping[str, int],
    here: NodeName,
    *,
    has_state: bool,
) -> Decision:
    """Returns what a job becomes; for `runtime.compute`.

    A job that is as proposed, on nodes that are still there, stays as it is.

    Args:
        asked: What decides, or what a program answered; None: the mesh stays, on whatever nodes.
        layout_json: The committed layout.
        nodes: Node -> devices, each > 0.
        here: This node.
        has_state: Whether there are bytes to move.

    Raises:
        InvalidError: No proposal makes a layout; why the first one does not.
    """
    layout = parse_layout(layout_json)
    job = _committed(layout)
    if asked is None:
        asked = _same(layout, nodes)
    answer = asked if isinstance(asked, Answer) else asked.propose(job, nodes)
    refused: InvalidError | None = None
    for proposal in answer.proposals[:_MAX_TRIED]:
        target = _target(proposal, job, layout, layout_json, nodes)
        try:
            resolve(target, layout_json, here, has_state=has_state)
        except InvalidError as error:
            refused = refused or error
        else:
            return Decision(target)
    if refused is not None:
        raise InvalidError(f"parallelizer: its layout is refused: {refused.message}")
    return Decision(None, answer.why)


async def ask_program(command: Command, text: bytes) -> bytes:
    """Returns what a program writes when it is given ``text``. It is run as it is, by no shell.

    Raises:
        InvalidError: It cannot be run, fails, or writes too much; with the last line of its standard error.
        TimedOutError: It took too long, and was killed with all that it started.
    """
    what = f"parallelizer: {command.argv[0]}"
    try:
        process = await trio.lowlevel.open_process(
            list(command.argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
        )
    except (OSError, ValueError) as error:
        raise InvalidError(f"{what}: cannot be run: {error}") from error
    out, err = bytearray(), bytearray()
    try:
        with trio.move_on_after(command.timeout_s) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_write, process, text)
                nursery.start_soon(_read_last, process, err)
                nursery.start_soon(_read_all, process, out)
                await process.wait()
                # What it left running may have its output open; all that it wrote itself can be read by now.
                _kill(process)
                nursery.cancel_scope.deadline = trio.current_time() + _LEFT_S
    finally:
        _kill(process)
        with trio.CancelScope(shield=True):
            await process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                assert stream is not None
                await stream.aclose()
    lines = err.decode(errors="replace").strip().splitlines() or [""]
    last = "".join(letter for letter in lines[-1][:500] if letter.isprintable())
    said = f": {last}" if last else ""
    if scope.cancelled_caught:
        raise TimedOutError(f"{what}: no answer within {command.timeout_s:g} s{said}")
    if len(out) > MAX_ANSWER_BYTES:
        raise InvalidError(f"{what}: wrote more than {MAX_ANSWER_BYTES} bytes{said}")
    if process.returncode:
        raise InvalidError(f"{what}: ended with status {process.returncode}{said}")
    return bytes(out)


async def _write(process: trio.Process, text: bytes) -> None:
    assert process.stdin is not None
    with suppress(trio.BrokenResourceError):  # it does not want to know all
        await process.stdin.send_all(text)
    await process.stdin.aclose()


async def _read_all(process: trio.Process, into: bytearray) -> None:
    assert process.stdout is not None
    while len(into) <= MAX_ANSWER_BYTES and (data := await process.stdout.receive_some(_CHUNK_BYTES)):
        into += data
    if len(into) > MAX_ANSWER_BYTES:
        _kill(process)


def _kill(process: trio.Process) -> None:
    """Ends it with all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _read_last(process: trio.Process, into: bytearray) -> None:
    assert process.stderr is not None
    while data := await process.stderr.receive_some(_CHUNK_BYTES):
        into += data
        del into[:-_STDERR_BYTES]


def _committed(layout: Layout) -> Committed:
    batch = None if layout.dataset is None else layout.dataset.global_batch
    return Committed(dict(layout.mesh.axes), batch)


def _same(layout: Layout, nodes: Mapping[str, int]) -> Answer:
    total = sum(nodes.values())
    if total < layout.mesh.size:
        raise InvalidError(
            f"{total} devices for {layout.mesh.size} ranks, and the job has no parallelizer that says "
            "what to do: give a layout or a mesh, or make the job with --set parallelizer=..."
        )
    return Answer((Proposal({}, layout.keep_together or _together(layout, nodes)),))


def _together(layout: Layout, nodes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes whose ranks are on one node now, as far as that fits on ``nodes``."""
    node_of = np.zeros(layout.mesh.size, np.int64)
    for number, (_, ranks) in enumerate(layout.nodes):
        node_of[list(ranks)] = number
    kept: tuple[str, ...] = ()
    for axis, size in reversed(layout.mesh.axes):
        axes = (axis, *kept)
        others = tuple(name for name, _ in layout.mesh.axes if name not in axes)
        group = layout.mesh.coordinates(others)
        block = layout.mesh.size_of(axes)
        spread = np.unique(np.stack([group, node_of]), axis=1).shape[1]
        if size > 1 and spread == group.max() + 1 and fits_on_nodes(block, layout.mesh.size // block, nodes):
            kept = axes
    return kept


def _target(
    proposal: Proposal, job: Committed, layout: Layout, layout_json: bytes, nodes: Mapping[str, int]
) -> Target:
    if proposal.layout_json:
        return Target(layout_json=proposal.layout_json)
    held = {str(node): len(ranks) for node, ranks in layout.nodes}
    if {**job.mesh, **proposal.mesh} == job.mesh and same_on_nodes(held, nodes):
        return Target(layout_json=layout_json)
    devices = {NodeName(node): count for node, count in nodes.items()}
    return Target(mesh=proposal.mesh, nodes=devices, together=proposal.together)
