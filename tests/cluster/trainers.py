"""Jobs with datasets, and their ranks as trainers, for the tests of datasets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import tenplexfs
from tenplexfs.core.order import Order
from tests.cluster.daemons import Daemon, Daemons
from tests.runtime.cluster import write_safetensors

BATCH = 4


def layout(
    dp: int, *, batch: int = BATCH, nodes: dict[str, list[int]] | None = None, **dataset: object
) -> str:
    half = (dp + 1) // 2
    spread = {"node0": list(range(half)), "node1": list(range(half, dp))}
    return json.dumps(
        {
            "format": "tenplexfs-layout",
            "version": 1,
            "mesh": {"dp": dp},
            "nodes": nodes or {node: ranks for node, ranks in spread.items() if ranks},
            "tensors": {"w": {"shape": [4, 4], "dtype": "float32"}},
            "dataset": {"axis": "dp", "global_batch": batch, **dataset},
        }
    )


class Job:
    """A job, and its ranks as trainers: each reads from its node's mount and saves there."""

    def __init__(
        self, two: Daemons, name: str, dp: int, *, with_state: bool = True, **layout_fields: object
    ) -> None:
        self.two, self.name, self.first = two, name, two.nodes[0]
        self.reads: list[list[int]] = []
        self.step = 0
        self.first.ok("job", "create", name, "--layout", str(self.file(layout(dp, **layout_fields))))
        if with_state:
            model = two.base / "model.safetensors"
            write_safetensors(model, {"w": np.ones((4, 4), np.float32)})
            self.first.ok("import", name, str(model))

    def file(self, text: str) -> Path:
        path = self.two.base / f"{self.name}.layout.json"
        path.write_text(text)
        return path

    def add(self, name: str, *sources: Path | str, by: int = 1, options: Sequence[str] = ()) -> str:
        given = [part for source in sources for part in ("--source", str(source))]
        message: str = self.two.nodes[by].ok("dataset", "add", self.name, name, *given, *options)["message"]
        return message

    def reconfigure(self, text: str) -> None:
        self.first.ok("reconfigure", self.name, str(self.file(text)))

    def root(self, node: int = 0) -> Path:
        return self.two.nodes[node].mount / self.name

    def data(self, name: str, rank: int = 0, epoch: int = 0) -> Path:
        return self.root() / "dataset" / name / str(epoch) / str(rank)

    def meta(self, name: str) -> dict[str, object]:
        return json.loads((self.root() / "dataset" / name / "meta.json").read_text())

    def ranks(self) -> list[Daemon]:
        nodes = json.loads((self.root() / "job.json").read_text())["nodes"]
        where = {rank: node for node in self.two.nodes for rank in nodes.get(node.name, ())}
        return [where[rank] for rank in sorted(where)]

    def train(self, steps: int, *, epoch: int | None = None) -> None:
        """Each rank reads its part of `steps` batches; then all save."""
        loaders = [
            tenplexfs.Dataset(node.mount / self.name / "dataset/train", rank=rank, epoch=epoch)
            for rank, node in enumerate(self.ranks())
        ]
        for batch in range(steps):
            ids: list[int] = []
            for loader in loaders:
                part = loader[batch * loader.local_batch : (batch + 1) * loader.local_batch]
                assert [sample[0] * 10 for sample in part] == [sample[1] for sample in part]
                ids += [int(sample[0]) for sample in part]
            self.reads.append(ids)
        self.step += steps

    def save(self, **how: object) -> None:
        paths = [node.mount / self.name / "model" / str(rank) for rank, node in enumerate(self.ranks())]
        states = [tenplexfs.load(path) for path in paths]
        saves = [
            tenplexfs.save(state, path, step=self.step, wait=False, **how)
            for state, path in zip(states, paths, strict=True)
        ]
        for save in saves:
            save.wait()


def rows_of(base: Path, count: int, name: str = "rows.npy") -> Path:
    rows = np.arange(count, dtype=np.int64)
    np.save(base / name, np.stack([rows, rows * 10], axis=1))
    return base / name


def order_of(count: int, seed: int, epoch: int) -> list[int]:
    return [int(sample) for sample in Order(count, seed, epoch).span(0, count)]
