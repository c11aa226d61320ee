"""Runs training examples with ranks that come and go; their losses are those of runs that nobody disturbs.

python examples/elastic.py digits fsdp2
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from daemons import TENPLEXFS, Node, cluster, run

HERE = Path(__file__).parent
SHORT = {"digits": ["--epochs", "1"], "fsdp2": ["--steps", "26"]}
PACE = ["--pace", "0.2"]  # so that there is time to change something
CHANGES = {4: 4, 12: 1, 20: 2}
"""After which step, and how many ranks from then on."""
TOLERANCE = 1e-3  # other ranks add up in another order


def command(node: Node, job: str, example: str, arguments: list[str], *, ranks: int) -> list[str]:
    script = str(HERE / example / "train.py")
    launch = ["run", "--mount", str(node.mount), "--job", job, "--nproc", str(ranks)]
    return [*TENPLEXFS, *launch, "--", script, *arguments]


def undisturbed(node: Node, example: str) -> dict[int, float]:
    started = command(node, f"{example}-alone", example, SHORT[example], ranks=1)
    done = subprocess.run(started, stdout=subprocess.PIPE, text=True, check=True)
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", done.stdout)}


def elastic(node: Node, example: str) -> tuple[dict[int, float], list[int]]:
    """Returns the loss of each step, and the numbers of ranks, one after the other."""
    losses: dict[int, float] = {}
    counts: list[int] = []
    changes = dict(CHANGES)
    started = command(node, example, example, [*SHORT[example], "--save-every", "4", *PACE], ranks=2)
    with (
        ThreadPoolExecutor(1) as aside,
        subprocess.Popen(started, stdout=subprocess.PIPE, text=True) as process,
    ):
        asked = []
        for line in process.stdout:
            print(line, end="", flush=True)
            if not (found := re.match(r"step (\d+) loss (\S+) ranks (\d+)", line)):
                continue
            step = int(found[1])
            if step in losses:
                raise SystemExit(f"step {step} was run twice")
            losses[step] = float(found[2])
            counts += [] if counts[-1:] == [int(found[3])] else [int(found[3])]
            due = [each for each in changes if each <= step and (node.mount / example).is_dir()]
            if due and all(each.done() for each in asked):
                axis = json.loads((node.mount / example / "job.json").read_text())["mesh"][0]["name"]
                count = changes.pop(due[0])
                print(f"--- tenplexfs reconfigure {example} --mesh {axis}={count}", flush=True)
                mesh = ["--mesh", f"{axis}={count}", "--nodes", f"{node.name}:{count}"]
                asked.append(aside.submit(run, "reconfigure", example, *mesh, "--socket", node.socket))
        for each in asked:
            each.result()
    if process.returncode:
        raise SystemExit(f"the run ended with status {process.returncode}")
    return losses, counts


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with cluster(["node0"]) as (node,):
        for example in sys.argv[1:] or SHORT:
            wanted = undisturbed(node, example)
            losses, counts = elastic(node, example)
            worst = max(abs(losses[step] - loss) / abs(loss) for step, loss in wanted.items())
            text = " -> ".join(map(str, counts))
            print(
                f"{example}: {len(wanted)} steps, ranks {text}; losses differ by {worst:.1e} at most",
                flush=True,
            )
            if losses.keys() != wanted.keys() or worst > TOLERANCE or counts != [2, *CHANGES.values()]:
                raise SystemExit("not what the undisturbed run did")


if __name__ == "__main__":
    main()
