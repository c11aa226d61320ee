"""Reading a tensor through the mount, cold and warm, against the same file on tmpfs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from harness import MIB, cluster, measure, run, write_layout, write_safetensors

SHAPE = (256 * MIB // 4 // 1024, 1024)


def read(file: Path, buffer: memoryview, *, cold: bool = False) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        if cold:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        while os.readv(descriptor, [buffer]):
            pass
    finally:
        os.close(descriptor)


def main() -> None:
    tensor = np.random.default_rng(0).random(SHAPE, np.float32)
    with cluster(("node0",)) as (node,):
        base = node.socket.parent
        write_safetensors(base / "model.safetensors", {"w": tensor})
        layout = write_layout(base / "layout.json", {"w": SHAPE}, {"node0": [0]}, 0)
        run("job", "create", "bench", "--layout", layout, "--socket", node.socket)
        run("import", "bench", base / "model.safetensors", "--socket", node.socket)
        mounted = node.mount / "bench/model/0/w.npy"
        plain = node.store / "plain.npy"
        np.save(plain, tensor)
        if mounted.read_bytes() != plain.read_bytes():
            raise SystemExit("the mounted file is not the tensor")
        size, buffer = mounted.stat().st_size, memoryview(bytearray(MIB))
        measure(
            "read of 256 MiB, 1 MiB at a time",
            {
                "tmpfs": (size, lambda: read(plain, buffer)),
                "mount, cold": (size, lambda: read(mounted, buffer, cold=True)),
                "mount, warm": (size, lambda: read(mounted, buffer)),
            },
        )
        measure(
            "np.load of 256 MiB",
            {
                "tmpfs": (size, lambda: np.load(plain)),
                "mount, warm": (size, lambda: np.load(mounted)),
            },
        )


if __name__ == "__main__":
    main()
