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
    from tenplexfs.daemon.job_settings import check_settings
    from tenplexfs.formats import frames, manifest, safetensors
    from tenplexfs.formats.layout_json import parse_layout
    from tenplexfs.formats.npy_header import parse_npy
    from tenplexfs.formats.parallelizer_json import parse_answer
    from tenplexfs.formats.values import Values, pack, unpack
    from tenplexfs.rpc.wire import FetchRequest
    from tenplexfs.runtime.protocols import Ranges
    from tests.fuzz.test_layouts import EXPLICIT, MESHED

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
