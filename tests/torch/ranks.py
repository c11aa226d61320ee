"""Process groups for tests: torch and the checks are imported once, then each group of ranks is forked.

One line of JSON in for each group, ``{"check", "world", "mounts", "where", ...}``, one out: what each rank's
check returned, or its traceback.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import json
import os
import sys
import traceback
import uuid
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel  # so that no rank imports it by itself

from tests.torch.context import Context

PATIENCE_S = 120


def run_rank(checks: ModuleType, rank: int, order: dict, answer: int) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)  # what hangs, says where
    world = order["world"]
    try:
        if world:
            store = dist.FileStore(order["store"], world)
            patience = datetime.timedelta(seconds=PATIENCE_S)
            dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=patience)
        context = Context(rank, max(world, 1), Path(order["mounts"][rank]), Path(order["where"]))
        result = {"ok": getattr(checks, order["check"])(context, **order["arguments"])}
        if world:
            dist.destroy_process_group()
    except BaseException:
        result = {"failure": traceback.format_exc()}
    with os.fdopen(answer, "w") as pipe:
        json.dump(result, pipe)


def run_group(checks: ModuleType, order: dict) -> list[dict]:
    order["store"] = str(Path(order["where"]) / f"store-{uuid.uuid4().hex}")
    pipes, pids = [], []
    for rank in range(max(order["world"], 1)):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                os.close(read)
                run_rank(checks, rank, order, write)
                code = 0
            os._exit(code)
        os.close(write)
        pipes.append(read)
        pids.append(pid)
    results = []
    for read in pipes:
        with os.fdopen(read) as pipe:
            text = pipe.read()
        results.append(json.loads(text) if text else {"failure": "died"})
    for pid in pids:
        os.waitpid(pid, 0)
    return results


def main() -> None:
    checks = importlib.import_module(sys.argv[1])
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run_group(checks, json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
