"""Samples through the mount against np.memmap of the same file in the same order, and first batches.

With ``--remote`` also: an object store over a link of 500 Mbit/s that takes 20 ms for each answer, read by a
trainer that consumes 80 % of the link. That needs root, ip and tc.
"""
# ruff: noqa: D102

from __future__ import annotations

import argparse
import http.server
import json
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from harness import MIB, Node, cluster, measure, run
from network import network

import tenplexfs

SIZE = 8192
COUNT = 16384
BATCH = 64
REMOTE_SIZE, REMOTE_COUNT, REMOTE_BATCH = 256 << 10, 1600, 8
LINK_MBIT, ANSWER_S, SHARE = 500, 0.02, 0.8
PORT = 8099


def layout(path: Path, dp: int) -> Path:
    content = {
        "format": "tenplexfs-layout",
        "version": 1,
        "mesh": {"dp": dp},
        "nodes": {"node0": list(range(dp))},
        "tensors": {},
        "dataset": {"axis": "dp", "global_batch": BATCH},
    }
    path.write_text(json.dumps(content))
    return path


def add(node: Node, job: str, source: object, *options: object) -> Path:
    base = node.socket.parent
    run("job", "create", job, "--layout", layout(base / "layout.json", 1), "--socket", node.socket)
    run("dataset", "add", job, "train", "--source", source, *options, "--socket", node.socket)
    assert node.mount is not None
    return node.mount / job / "dataset/train"


class Epochs:
    """One pass over an epoch that was not read before, so that nothing of it is in the kernel's cache."""

    def __init__(self, directory: Path, rows: np.ndarray) -> None:
        self.directory, self.rows = directory, rows
        self.epoch = 0
        self.orders: dict[int, np.ndarray] = {}

    def next_order(self) -> np.ndarray:
        order: np.ndarray = np.load(self.directory / str(self.epoch) / "0/order.npy")
        return order

    def memmap(self) -> None:
        """Reads batches by index from the file that the dataset was made of."""
        order = self.next_order()
        for begin in range(0, COUNT, BATCH):
            self.rows[order[begin : begin + BATCH]]  # a copy

    def mount(self) -> None:
        for _ in tenplexfs.Dataset(self.directory, rank=0, epoch=self.fresh()).batches():
            pass

    def fresh(self) -> int:
        self.epoch += 1
        return self.epoch

    def loaded_memmap(self, workers: int) -> None:
        import torch
        from torch.utils.data import DataLoader, Dataset

        rows, order = self.rows, self.next_order()

        class Mapped(Dataset):  # type: ignore[type-arg]
            def __len__(self) -> int:
                return COUNT

            def __getitem__(self, item: int) -> object:
                return torch.from_numpy(np.array(rows[order[item]]))

        for _ in DataLoader(Mapped(), batch_size=BATCH, num_workers=workers):
            pass

    def loaded_mount(self, workers: int) -> None:
        from torch.utils.data import DataLoader

        from tenplexfs.torch import Dataset

        dataset = Dataset(self.directory, rank=0, epoch=self.fresh())
        for _ in DataLoader(dataset, batch_size=BATCH, num_workers=workers):
            pass


def samples(node: Node) -> None:
    base = node.socket.parent
    np.save(base / "rows.npy", np.random.default_rng(0).integers(0, 256, (COUNT, SIZE), np.uint8))
    epochs = Epochs(add(node, "samples", base / "rows.npy"), np.load(base / "rows.npy", mmap_mode="r"))
    first = tenplexfs.Dataset(epochs.directory, rank=0, epoch=1)
    if not np.array_equal(first[:BATCH], epochs.rows[first.ids()[:BATCH]]):
        raise SystemExit("the mounted samples are not those of the file")
    total = SIZE * COUNT
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "batches in numpy": (epochs.memmap, epochs.mount),
        "torch's loader, 0 workers": (lambda: epochs.loaded_memmap(0), lambda: epochs.loaded_mount(0)),
        "torch's loader, 2 workers": (lambda: epochs.loaded_memmap(2), lambda: epochs.loaded_mount(2)),
    }
    for title, (mapped, mounted) in pairs.items():
        measure(
            f"{COUNT} samples of {SIZE} bytes, {title}",
            {"np.memmap": (total, mapped), "mount, cold": (total, mounted)},
        )


def first_batches(node: Node) -> None:
    """Prints how soon after `reconfigure` has returned the first batch of a rank is there."""
    base = node.socket.parent
    print("\nfirst batch after a reconfiguration, once it was answered")
    for count in (10_000, 10_000_000):
        file = base / f"{count}.bin"
        with file.open("wb") as sparse:
            sparse.truncate(count * 64)
        directory = add(node, f"resize{count}", file, "--kind", "records", "--record-bytes", 64)
        times, switches = [], []
        for dp in (2, 4, 8, 4, 2):
            begin = time.perf_counter()
            run("reconfigure", f"resize{count}", layout(base / "new.json", dp), "--socket", node.socket)
            switched = time.perf_counter()
            dataset = tenplexfs.Dataset(directory, rank=dp - 1)
            assert len(dataset[: dataset.local_batch]) == BATCH // dp
            times.append(time.perf_counter() - switched)
            switches.append(switched - begin)
        middle, most = statistics.median(times) * 1e3, max(times) * 1e3
        print(
            f"  {count:>10} samples: {middle:6.1f} ms, at most {most:.1f} ms "
            f"(the command before it: {statistics.median(switches):.2f} s)"
        )


class Slow(http.server.BaseHTTPRequestHandler):
    """An object of random bytes, each range of it after a while."""

    protocol_version = "HTTP/1.1"
    body = b""

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert asked is not None
        begin, end = int(asked[1]), int(asked[2]) + 1
        time.sleep(ANSWER_S)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(self.body)}")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        self.wfile.write(memoryview(self.body)[begin:end])


def serve() -> None:
    Slow.body = np.random.default_rng(0).integers(0, 256, REMOTE_SIZE * REMOTE_COUNT, np.uint8).tobytes()
    http.server.ThreadingHTTPServer(("0.0.0.0", PORT), Slow).serve_forever()


@contextmanager
def process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen(command)
    try:
        yield running
    finally:
        running.terminate()
        running.wait()


def remote() -> None:
    """Prints how long a trainer waits that consumes 80 % of a link."""
    with network(("node0", "store")) as net:
        inside = [f"nsenter --net=/run/netns/{net.inside(host)[3]}".split() for host in (0, 1)]
        with (
            process([*inside[1], sys.executable, __file__, "--serve"]),
            cluster(("node0",), prefix=inside[0]) as (node,),
        ):
            options = ("--kind", "records", "--record-bytes", REMOTE_SIZE, "--global-batch", REMOTE_BATCH)
            net.limit(LINK_MBIT)
            directory = add(node, "remote", f"http://{net.address(1)}:{PORT}/data.bin", *options)
            step_s = REMOTE_BATCH * REMOTE_SIZE / (SHARE * LINK_MBIT * 1e6 / 8)
            dataset = tenplexfs.Dataset(directory, rank=0)
            waits, begin = [], time.perf_counter()
            for number in range(len(dataset) // REMOTE_BATCH):
                asked = time.perf_counter()
                dataset[number * REMOTE_BATCH : (number + 1) * REMOTE_BATCH]
                waits.append(time.perf_counter() - asked)
                time.sleep(max(step_s - waits[-1], 0))
            took = time.perf_counter() - begin
            late = [wait for wait in waits[1:] if wait > step_s]
            rate = dataset.local_batch * REMOTE_SIZE * len(waits) / took / MIB
            print(
                f"\n{REMOTE_COUNT} samples of {REMOTE_SIZE >> 10} KiB over {LINK_MBIT} Mbit/s, "
                f"{ANSWER_S * 1e3:.0f} ms an answer, {SHARE:.0%} of the link consumed\n"
                f"  first batch {waits[0] * 1e3:.0f} ms, "
                f"then median {statistics.median(waits[1:]) * 1e3:.1f} ms, "
                f"most {max(waits[1:]) * 1e3:.0f} ms of {step_s * 1e3:.0f} ms a step; "
                f"{len(late)} of {len(waits) - 1} steps late; {rate:.1f} MiB/s"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--remote", action="store_true", help="the remote source too, or --only it")
    parser.add_argument("--only", action="store_true", help="nothing but the remote source")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    if not options.only:
        with cluster(("node0",)) as (node,):
            samples(node)
            first_batches(node)
    if options.remote or options.only:
        remote()


if __name__ == "__main__":
    main()
