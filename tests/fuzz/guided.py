"""Readers of what comes from outside, fuzzed by what they cover: ``python -m tests.fuzz.guided layout``.

Without a name the first byte says which. For `make fuzz`; a test runs them all for a moment. Anything but a
TenplexError, of one line, is a bug.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

Target = tuple[Callable[[bytes], object], list[bytes]]
"""What reads, and texts to begin with."""


def targets() -> dict[str, Target]:
    # Imported here, while atheris instruments; and nowhere else, for it slows them.
    import numpy as np
    from safetensors.numpy import save

    from tenplexfs.core.build import build_ptc
    from tenplexfs.core.hostlist import expand_hostlist
    from tenplexfs.core.snapshot import Head, NodeInfo, SnapshotId
    from tenplexfs.daemon.job_settings import check_settings
    from tenplexfs.formats import checkpoint, frames, manifest, safetensors, sample_index, structure
    from tenplexfs.formats.head_json import head_of_text, text_of_head
    from tenplexfs.formats.layout_json import parse_layout
    from tenplexfs.formats.megatron import parse_idx
    from tenplexfs.formats.node_json import node_of_text, text_of_node
    from tenplexfs.formats.npy_header import parse_npy
    from tenplexfs.formats.parallelizer_json import parse_answer
    from tenplexfs.formats.tenplex_index import parse_tenplex_index
    from tenplexfs.formats.values import Values, pack, unpack
    from tenplexfs.rpc.wire import FetchRequest
    from tenplexfs.runtime.array_sums import decode_array_sums
    from tenplexfs.runtime.protocols import Ranges
    from tenplexfs.runtime.save_parts import decode_sums
    from tests.formats.test_megatron import idx
    from tests.formats.test_sample_index import TABLE, files_of, make
    from tests.fuzz import connections, registry
    from tests.fuzz.test_layouts import EXPLICIT, MESHED

    local = (checkpoint.Local(0, "w", "float32", (2, 3), 0),)
    files = (checkpoint.CheckpointFile("model/0", 24, local, (7,)),)
    made = checkpoint.Checkpoint("gpt", SnapshotId(1, 5, "0" * 16), 7, b"{}", 1, 2, files)
    answers, said = connections.answerer()
    call, calls = registry.caller()

    def summed(data: bytes) -> None:
        """Reads a manifest whose sum is right."""
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            return
        content = {"format": "tenplexfs-checkpoint", "version": 1, "xxh3_64": checkpoint._sum(body)}
        checkpoint.Checkpoint.decode(json.dumps({**content, "checkpoint": body}).encode())

    array = io.BytesIO()
    np.save(array, np.zeros((2, 3), np.float32))
    ranges = (Ranges(0, "w", 4, np.array([[[0, 0], [2, 2]]], np.int64)),)
    auto = {"kind": "auto", "model": "gpt3-1.3b", "global_batch": 8, "inter_node": "100Gbit/s"}
    settings = {"keep_steps": 2, "memory": "1GiB", "parallelizer": auto, "webhook": "https://host/path"}
    return {
        "layout": (
            lambda data: build_ptc(parse_layout(data)),
            [json.dumps(each).encode() for each in (MESHED, EXPLICIT)],
        ),
        "ranges": (FetchRequest.decode, [FetchRequest("gpt", "0" * 16, 0, ranges).encode()]),
        "frame": (frames.decode, [frames.encode({"id": 1, "op": "load", "path": "gpt", "step": None})[4:]]),
        "values": (unpack, [pack(Values({0: b"x"}, 7))]),
        "manifest": (manifest.decode, [manifest.encode(manifest.Manifest("node0", "ab", ()))]),
        "npy": (parse_npy, [array.getvalue()]),
        "safetensors": (safetensors.parse, [save({"w": np.zeros((2, 3), np.float32), "b": np.ones(3)})]),
        "settings": (
            lambda data: check_settings(data.decode(errors="replace"), insecure=False),
            [json.dumps(settings).encode()],
        ),
        "answer": (parse_answer, [b'{"mesh": {"tp": 2}, "keep_together": ["tp"]}', b'{"pause": "why"}']),
        "checkpoint": (summed, [json.dumps(json.loads(made.encode())["checkpoint"]).encode()]),
        "files": (checkpoint.decode_files, [checkpoint.encode_files(files)]),
        "index": (sample_index.parse_index, [files_of(make(TABLE))]),
        "tenplex": (parse_tenplex_index, [b"1\n/data/a 2\n0 5\n5 9\n"]),
        "idx": (parse_idx, [idx([3, 2, 0, 5], [0, 2, 2, 4], code=8, itemsize=2)]),
        "head": (head_of_text, [text_of_head(Head(SnapshotId(1, 5, "0" * 16), "ab", ("node0",))).encode()]),
        "node": (node_of_text, [text_of_node(NodeInfo("node0", "127.0.0.1:1", "ab", "1")).encode()]),
        "state": (
            lambda data: structure.unflatten(data, str),
            [structure.flatten({"a": [1, 2.5, None], "b": {1: "x"}}, lambda _: None).document],
        ),
        "sums": (decode_sums, [b"\x91\x94\xa1w\xc4\x01x\x00\x91\x07"]),
        "arrays": (decode_array_sums, [b"\x91\x93\x00\xa1w\x91\x07"]),
        "answers": (connections.read_answers, [connections.good_answers()]),
        "callers": (answers, [said]),
        "registry": (call, calls),
        "hosts": (lambda data: expand_hostlist(data.decode(errors="replace")), [b"n[01-03,07],gpu5"]),
    }


def main() -> None:
    import atheris

    with atheris.instrument_imports(include=["tenplexfs"]):
        found = targets()
    from tenplexfs.errors import TenplexError

    name = sys.argv[1] if sys.argv[1:2] and sys.argv[1] in found else ""
    every = [found[name]] if name else [*found.values()]
    prefix = [b""] if name else [bytes([number]) for number in range(len(every))]

    def once(data: bytes) -> None:
        number, rest = (0, data) if name else (data[0] % len(every) if data else 0, data[1:])
        try:
            every[number][0](rest)
        except TenplexError as error:
            assert "\n" not in error.message, error.message

    with tempfile.TemporaryDirectory() as corpus:
        for first, (_, seeds) in zip(prefix, every, strict=True):
            for number, seed in enumerate(seeds):
                (Path(corpus) / f"{first.hex()}-{number}").write_bytes(first + seed)
        flags = sys.argv[2:] if name else sys.argv[1:]
        atheris.Setup([sys.argv[0], *flags, "-rss_limit_mb=4096", "-timeout=20", corpus], once)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
