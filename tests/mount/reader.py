"""Reads random files of a job until it is told to stop; says how many, or what was wrong.

Run as a program: ``reader.py JOB SEED``. Each file must be whole, of one snapshot, and none older than one
that was read before.
"""

import json
import random
import select
import sys
from pathlib import Path

import numpy as np


def version_of(file: Path) -> int:
    """The snapshot that a file is of, from its content."""
    data = file.read_bytes()
    if file.suffix == ".json":
        return json.loads(data)["version"]
    assert len(data) == file.stat().st_size, f"{file}: {len(data)} bytes"
    header = 10 + int.from_bytes(data[8:10], "little")
    body = np.frombuffer(data[header:], np.uint8 if b"|u1" in data[:header] else np.float64)
    assert (np.diff(body.astype(np.int64)) % 50 == 1).all(), f"{file}: mixed"
    return int(body[0]) % 50


def main() -> None:
    job, chosen = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    files = [job / "job.json", job / "full/scale.npy", job / "full/big.npy"]
    files += [job / f"model/{rank}/{name}.npy" for rank in range(4) for name in ("scale", "big")]
    files += [job / f"ptc/{rank}.json" for rank in range(4)]
    count = last = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        version = version_of(chosen.choice(files))
        assert (version - last) % 50 < 25, f"version {version} after {last}"
        last = version
        count += 1
    sys.stdout.write(f"{count}\n")


if __name__ == "__main__":
    main()
