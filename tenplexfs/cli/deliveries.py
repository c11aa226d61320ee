"""Compares what the mount delivers of a dataset with order and source, by reading it as a trainer does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tenplexfs.core.cursor import Cursor, Extent, Tail
from tenplexfs.core.partition import Partition
from tenplexfs.errors import TenplexError
from tenplexfs.storage.samples.build import map_index
from tenplexfs.storage.samples.recipe import make_reader
from tenplexfs.storage.samples.source import IndexedSamples, read_samples

__all__ = ["check_rank", "check_ranks_together"]

_BATCHES_AT_ONCE = 1024
_SAMPLES_AT_ONCE = 64


def check_ranks_together(directory: Path, meta: dict[str, Any], epoch: int) -> list[str]:
    """Returns what is wrong with the batches that the ranks deliver together, in the order.

    Args:
        directory: ``dataset/<name>`` of a mount.
        meta: Its ``meta.json``.
        epoch: Which one.
    """
    ranks = range(meta["degree"])
    orders = [np.load(directory / str(epoch) / str(rank) / "order.npy", mmap_mode="r") for rank in ranks]
    extent = Extent(meta["samples"], Tail(meta["tail"]))
    start = Cursor.from_json(meta["row_0"]).start_of(epoch)
    if meta["unsplit"]:
        whole = Partition.of(start, extent, degree=1, shuffle=meta["shuffle"])
        wanted = whole.rank(0).span(0, whole.rank(0).count)
        return [
            f"rank {rank}: its order is not the dataset's"
            for rank, order in zip(ranks, orders, strict=True)
            if not np.array_equal(order, wanted)
        ]
    part = Partition.of(start, extent, degree=meta["degree"], shuffle=meta["shuffle"], uneven=True)
    rows = [part.rank(rank) for rank in ranks]
    for rank in ranks:
        if len(orders[rank]) != rows[rank].count:
            return [f"rank {rank}: {len(orders[rank])} rows, the order has {rows[rank].count} for it"]
    for first in range(0, part.batches, _BATCHES_AT_ONCE):
        last = min(first + _BATCHES_AT_ONCE, part.batches)
        for number in range(first, last):
            got = np.concatenate(
                [orders[rank][rows[rank].end_of(number) : rows[rank].end_of(number + 1)] for rank in ranks]
            )
            if not np.array_equal(got, part.batch(number)):
                return [
                    f"epoch {epoch}, batch {number}: ids {got[:8].tolist()}, in the order they are others"
                ]
    return []


def check_rank(directory: Path, index_file: Path, samples: int) -> tuple[int, list[str]]:
    """Compares samples that a rank gets with what their source has; returns how many, and what is wrong.

    Args:
        directory: ``dataset/<name>/<epoch>/<rank>`` of a mount.
        index_file: The index of the dataset.
        samples: At most so many, from the next one on; 0: all.
    """
    meta = json.loads((directory / "meta.json").read_text())
    order = np.load(directory / "order.npy", mmap_mode="r")
    begin = meta["next"] if meta["next"] < len(order) else 0
    end = min(begin + samples, len(order)) if samples else len(order)
    wrong: list[str] = []
    reader = make_reader()
    try:
        source = IndexedSamples(map_index(index_file), reader)
        with (directory / ("data.npy" if source.shape is not None else "data.bin")).open("rb") as file:
            data_at, edges = _edges(directory, source, len(order), file.seek(0, 2))
            for first in range(begin, end, _SAMPLES_AT_ONCE):
                rows = np.arange(first, min(first + _SAMPLES_AT_ONCE, end))
                for row, wanted in zip(rows.tolist(), read_samples(source, order[rows]), strict=True):
                    file.seek(data_at + edges(row))
                    if file.read(len(wanted)) != wanted:
                        wrong.append(f"{directory.name}: row {row} is not sample {order[row]} of the source")
    except (OSError, TenplexError) as error:
        wrong.append(f"rank {directory.name}: {error}")
    finally:
        reader.close()
    return end - begin, wrong


def _edges(directory: Path, source: IndexedSamples, rows: int, size: int) -> tuple[int, Any]:
    """Returns where the samples begin in the file, and a function: where a row does, from there on."""
    if source.shape is not None:
        width = int(source.sizes(np.zeros(1, np.int64))[0]) if source.count else 0
        return size - rows * width, lambda row: row * width
    index: npt.NDArray[np.int64] = np.load(directory / "index.npy", mmap_mode="r")
    return 0, lambda row: int(index[row, 0])
