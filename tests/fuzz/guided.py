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

import atheris
import numpy as np
from safetensors.numpy import save

with atheris.instrument_imports(include=["tenplexfs"]):
    from tenplexfs.core.build import build_ptc
    from tenplexfs.core.hostlist import expand_hostlist
    from tenplexfs.daemon.job_settings import check_settings
    from tenplexfs.errors import TenplexError
    from tenplexfs.formats import frames, manifest, safetensors
    from tenplexfs.formats.layout_json import parse_layout
    from tenplexfs.formats.npy_header import parse_npy
    from tenplexfs.formats.parallelizer_json import parse_answer
    from tenplexfs.formats.values import Values, pack, unpack
    from tenplexfs.rpc.wire import FetchRequest
    from tenplexfs.runtime.protocols import Ranges

from tests.fuzz.test_layouts import EXPLICIT, MESHED

RANGES = (Ranges(0, "w", 4, np.array([[[0, 0], [2, 2]]], np.int64)),)
LAYOUTS = [json.dumps(MESHED).encode(), json.dumps(EXPLICIT).encode()]
ARRAY = io.BytesIO()
np.save(ARRAY, np.zeros((2, 3), np.float32))
AUTO = {"kind": "auto", "model": "gpt3-1.3b", "global_batch": 8, "inter_node": "100Gbit/s"}
SETTINGS = {"keep_steps": 2, "memory": "1GiB", "parallelizer": AUTO, "webhook": "https://host/path"}
TARGETS: dict[str, tuple[Callable[[bytes], object], list[bytes]]] = {
    "layout": (lambda data: build_ptc(parse_layout(data)), LAYOUTS),
    "ranges": (FetchRequest.decode, [FetchRequest("gpt", "0" * 16, 0, RANGES).encode()]),
    "frame": (frames.decode, [frames.encode({"id": 1, "op": "load", "path": "gpt", "step": None})[4:]]),
    "values": (unpack, [pack(Values({0: b"x"}, 7))]),
    "manifest": (manifest.decode, [manifest.encode(manifest.Manifest("node0", "ab", ()))]),
    "npy": (parse_npy, [ARRAY.getvalue()]),
    "safetensors": (safetensors.parse, [save({"w": np.zeros((2, 3), np.float32), "b": np.ones(3)})]),
    "settings": (
        lambda data: check_settings(data.decode(errors="replace"), insecure=False),
        [json.dumps(SETTINGS).encode()],
    ),
    "answer": (parse_answer, [b'{"mesh": {"tp": 2}, "keep_together": ["tp"]}', b'{"pause": "why"}']),
    "hosts": (lambda data: expand_hostlist(data.decode(errors="replace")), [b"n[01-03,07],gpu5"]),
}


def main() -> None:
    name, flags = (
        (sys.argv[1], sys.argv[2:]) if sys.argv[1:2] and sys.argv[1] in TARGETS else ("", sys.argv[1:])
    )
    every = [*TARGETS.values()]
    seeds = (
        TARGETS[name][1]
        if name
        else [bytes([i]) + seed for i, (_, each) in enumerate(every) for seed in each]
    )

    def once(data: bytes) -> None:
        function = TARGETS[name][0] if name else every[data[0] % len(every)][0] if data else len
        try:
            function(data if name else data[1:])
        except TenplexError as error:
            assert "\n" not in error.message, error.message

    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds):
            (Path(corpus) / str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], *flags, "-rss_limit_mb=4096", "-timeout=20", corpus], once)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
