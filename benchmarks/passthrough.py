"""libfuse's example ``passthrough_ll``: what a file system in C does with the same requests."""

from __future__ import annotations

import gzip
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXAMPLES = Path("/usr/share/doc/libfuse3-dev/examples")


def shell(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True)
    return done.stdout


def example_sources(here: Path) -> Path:
    """Returns libfuse's examples as Debian ships them; images without documentation get the package again."""
    if not EXAMPLES.exists():
        subprocess.run(["apt-get", "download", "-q", "libfuse3-dev"], cwd=here, check=True)
        subprocess.run(["dpkg-deb", "-x", next(here.glob("*.deb")), here], check=True)
        return here / EXAMPLES.relative_to("/")
    return EXAMPLES


class Example:
    """libfuse's ``passthrough_ll``, built from its source; its cache always keeps."""

    def __init__(self, here: Path) -> None:
        here.mkdir()
        examples = example_sources(here)
        for name in ("passthrough_ll.c", "passthrough_helpers.h"):
            file = examples / name
            text = file.read_bytes() if file.exists() else gzip.decompress(Path(f"{file}.gz").read_bytes())
            (here / name).write_bytes(text)
        flags = shell("pkg-config", "fuse3", "--cflags", "--libs").split()
        self._program = here / "passthrough_ll"
        source = here / "passthrough_ll.c"
        subprocess.run(["gcc", "-O2", "-w", source, "-o", self._program, *flags], check=True)
        self._mount = here / "mount"
        self._mount.mkdir()

    @contextmanager
    def mounted(self, source: Path) -> Iterator[Path]:
        """Shows ``source`` while entered."""
        command = [self._program, "-f", "-o", f"source={source},cache=always", self._mount]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                while not os.path.ismount(self._mount):
                    time.sleep(0.01)
                yield self._mount
            finally:
                subprocess.run(["fusermount3", "-u", "-z", self._mount], check=True)
                process.wait()
