"""Runs a training example with ranks that come and go; its losses are those of a run that nobody disturbs.

python examples/elastic.py digits --epochs 2
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from daemons import TENPLEXFS, Node, cluster, run

HERE = Path(__file__).parent
SHORT = {"digits": ["--epochs", "2"], "fsdp2": ["--steps", "45"]}
PACE = ["--pace", "0.3"]  # so that there is time to change something
CHANGES = {8: 4, 20: 1, 32: 2}
"""After which step, and how many ranks from then on."""
TOLERANCE = 1e-3  # other ranks add up in another order


def command(node: Node, job: str, example: str, arguments: list[str], *, ranks: int) -> list[str]:
    script = str(HERE / example / "train.py")
    launch = ["run", "--mount", str(node.mount), "--job", job, "--nproc", str(ranks)]
    return [*TENPLEXFS, *launch, "--", script, *arguments]


def undisturbed(node: Node, example: str, arguments: list[str]) -> dict[int, float]:
    started = command(node, f"{example}-alone", example, arguments, ranks=1)
    done = subprocess.run(started, stdout=subprocess.PIPE, text=True, check=True)
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", done.stdout)}


def main() -> None:
    example, arguments = sys.argv[1], sys.argv[2:] or SHORT[sys.argv[1]]
    with cluster(["node0"]) as (node,), ThreadPoolExecutor(1) as aside:
        wanted = undisturbed(node, example, arguments)
        assert node.mount is not None
        changes = dict(CHANGES)
        ranks, asked = {}, []
        losses: dict[int, float] = {}
        started = command(node, example, example, [*arguments, *PACE], ranks=2)
        with subprocess.Popen(started, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if not (found := re.match(r"step (\d+) loss (\S+) ranks (\d+)", line)):
                    continue
                step = int(found[1])
                if step in losses:
                    raise SystemExit(f"step {step} was run twice")
                losses[step], ranks[step] = float(found[2]), int(found[3])
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
        worst = max(abs(losses[step] - loss) / abs(loss) for step, loss in wanted.items())
        counts = [ranks[step] for step in sorted(ranks)]
        seen = [n for i, n in enumerate(counts) if i == 0 or counts[i - 1] != n]
        print(
            f"{len(wanted)} steps, ranks {' -> '.join(map(str, seen))}; losses differ by {worst:.1e} at most"
        )
        if losses.keys() != wanted.keys() or worst > TOLERANCE or seen != [2, *CHANGES.values()]:
            raise SystemExit("not what the undisturbed run did")


if __name__ == "__main__":
    main()
