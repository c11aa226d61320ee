"""Plans of the largest jobs: time, and memory of the whole process, each case in a process of its own.

Planning is one thread that waits for nothing, so its processor time is what it takes on a machine that does
nothing else; a clock would measure the neighbours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tenplexfs.core.build import build_ptc
from tenplexfs.core.node_part import node_part
from tenplexfs.core.planner import Plan, plan
from tenplexfs.core.presets import preset_layout
from tenplexfs.core.ptc import PTC
from tenplexfs.formats.layout_json import parse_layout

ROUNDS = 5
DEVICES = 8
Degrees = tuple[int, int, int]

CASES: tuple[tuple[str, Degrees, Degrees], ...] = (
    ("gpt3-175b", (8, 8, 16), (4, 16, 16)),
    ("gpt3-175b", (8, 8, 16), (8, 16, 8)),
    ("llama3-405b", (8, 16, 128), (8, 8, 256)),
)
"""Preset, and tp, pp, dp before and after."""


def made_ptc(name: str, degrees: Degrees, *, zero: bool) -> PTC:
    """Builds the PTC of a preset with Adam on nodes of eight."""
    tp, pp, dp = degrees
    nodes = [f"node{k:05}" for k in range(-(-tp * pp * dp // DEVICES))]
    layout = preset_layout(name, tp=tp, pp=pp, dp=dp, nodes=nodes, optimizer="adam", zero=zero)
    return build_ptc(parse_layout(json.dumps(layout)))


def overlaps(made: Plan) -> int:
    """Returns the pairs of a node and an overlap of old and new pieces that it needs, over all tensors."""
    return sum(len(match.row_node) * len(match.pairs) for match in made.matches)


def peak_mib() -> float:
    """Returns the most memory that this process ever had; ru_maxrss would count what it was forked from."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure(name: str, old: Degrees, new: Degrees, *, zero: bool, rounds: int = ROUNDS) -> dict[str, Any]:
    """Plans once to warm up, then ``rounds`` times; returns medians."""
    begin = time.process_time()
    before, after = made_ptc(name, old, zero=zero), made_ptc(name, new, zero=zero)
    build_s = time.process_time() - begin
    base_mib = peak_mib()
    plan_s, part_s = [], []
    for n in range(rounds + 1):
        begin = time.process_time()
        made = plan(before, after)
        summary = made.summary()
        middle = time.process_time()
        part = node_part(made, made.nodes[len(made.nodes) // 2])
        end = time.process_time()
        if n:
            plan_s.append(middle - begin)
            part_s.append(end - middle)
    assert summary["bytes"]["moved"] == summary["bytes"]["moved_lower_bound"]
    return {
        "ranks": before.world_size,
        "overlaps": overlaps(made),
        "moved": summary["bytes"]["moved"],
        "build_s": build_s,
        "plan_s": statistics.median(plan_s),
        "part_s": statistics.median(part_s),
        "ranges": sum(len(moves.source_boxes) for target in part.targets for moves in target.moves),
        "base_mib": base_mib,
        "peak_mib": peak_mib(),
    }


def in_child(name: str, old: Degrees, new: Degrees, *, zero: bool) -> dict[str, Any]:
    """Measures in a process of its own."""
    case = json.dumps([name, old, new, zero])
    done = subprocess.run(
        [sys.executable, __file__, "--case", case], check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help="measure this one, print JSON")
    asked = parser.parse_args().case
    if asked is not None:
        name, old, new, zero = json.loads(asked)
        print(json.dumps(measure(name, tuple(old), tuple(new), zero=zero)))
        return
    print(f"\nplans, processor time, medians of {ROUNDS}; tp, pp, dp; MiB of the process (before it plans)")
    for name, old, new in CASES:
        for zero in (False, True):
            got = in_child(name, old, new, zero=zero)
            what = f"{name}{' zero' if zero else ''} {old} to {new}"
            print(
                f"  {what:46} {got['ranks']:6,} ranks   plan {got['plan_s'] * 1e3:6.0f} ms   "
                f"a node's part {got['part_s'] * 1e3:4.0f} ms ({got['ranges']:7,} ranges)   "
                f"{got['peak_mib']:4.0f} MiB ({got['base_mib']:.0f})"
            )
    print("\nllama3-405b zero, (8, 8, d) to (4, 16, d): time against overlaps")
    for dp in (1, 4, 16, 64, 256):
        got = in_child("llama3-405b", (8, 8, dp), (4, 16, dp), zero=True)
        each_us = got["plan_s"] / got["overlaps"] * 1e6
        took = f"plan {got['plan_s'] * 1e3:5.0f} ms   {each_us:5.2f} us each"
        part = f"a node's part {got['part_s'] * 1e3:4.0f} ms   {got['peak_mib']:4.0f} MiB"
        print(f"  {got['ranks']:6,} ranks   {got['overlaps']:10,} overlaps   {took}   {part}")


if __name__ == "__main__":
    main()
