"""A training process of the save tests: one line of JSON in, one out, until its input ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import tenplexfs
from tenplexfs.core.build import build_ptc
from tenplexfs.errors import TenplexError
from tenplexfs.formats.layout_json import parse_layout
from tests.states import shard_of, tensors_of


def state_of(layout: bytes, rank: int, seed: int) -> dict[str, object]:
    """What `rank` holds when the whole tensors are drawn from `seed`."""
    ptc = build_ptc(parse_layout(layout))
    whole = tensors_of(ptc, seed)
    state: dict[str, object] = {
        path.replace("/", "."): shard_of(ptc, rank, path, whole[ptc.tensors[path].path])
        for path in ptc.rank_paths(rank)
    }
    state["step"] = seed
    state["per_rank"] = {"seed": 1000 + rank, "names": ("a", None, {1, 2})}
    return state


def flat(state: dict[str, object], prefix: str = "") -> dict[str, object]:
    out: dict[str, object] = {}
    for key, value in state.items():
        path = f"{prefix}{key}".replace(".", "/")
        if isinstance(value, dict):
            out.update(flat(value, f"{path}/"))
        else:
            out[path] = value
    return out


def matches(state: dict[str, object], wanted: dict[str, object]) -> list[str]:
    """Names what differs."""
    found, wanted = flat(state), flat(wanted)
    wrong = sorted(found.keys() ^ wanted.keys())
    for path in found.keys() & wanted.keys():
        a, b = found[path], wanted[path]
        if isinstance(b, np.ndarray):
            assert isinstance(a, np.ndarray)
            if (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes()):
                wrong.append(path)
        elif a != b or type(a) is not type(b):
            wrong.append(f"{path}: {a!r}")
    return wrong


def main() -> None:
    job = Path(sys.argv[1])
    rank = int(sys.argv[2])
    saves = []
    layout = (job / "layout.json").read_bytes()
    for line in sys.stdin:
        do, *arguments = json.loads(line)
        try:
            if do == "save":
                seed, wait = arguments
                state = state_of(layout, rank, seed)
                made = tenplexfs.save(state, job / "model" / str(rank), step=seed, wait=wait)
                saves.append(made)
                answer = made.snapshot
            elif do == "wait":
                answer = saves[-1].wait(60)
            elif do == "load":
                (seed,) = arguments
                state = tenplexfs.load(job / "model" / str(rank))
                answer = matches(state, state_of(layout, rank, seed))
            elif do == "should_stop":
                answer = tenplexfs.should_stop(job, arguments[0], rank=rank)
            else:
                raise ValueError(do)
        except (TenplexError, OSError) as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
