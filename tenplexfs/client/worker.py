"""What `tenplexfs run` lets torchrun start for each rank: the training script, under the rank of the layout.

A script that ends with `EXIT_RECONFIGURE` ends well for torchrun, which would kill the other ranks otherwise;
the launcher reads in a note how it ended.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
from contextlib import suppress
from pathlib import Path

from tenplexfs import EXIT_RECONFIGURE

__all__ = ["BEGUN", "main"]

BEGUN = "begun "
"""What the note of a rank says before it ends; its pid follows."""


def main() -> None:
    """Runs the script that the arguments name, as ``__main__``."""
    sys.argv = sys.argv[1:]
    rank = os.environ["TENPLEXFS_RANKS"].split(",")[int(os.environ["LOCAL_RANK"])]
    os.environ["RANK"] = rank
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    note = Path(os.environ.pop("TENPLEXFS_NOTES")) / rank
    note.write_text(f"{BEGUN}{os.getpid()}")
    status = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    finally:
        note.write_text(str(status))
    _end(0 if status == EXIT_RECONFIGURE else status)


def _end(status: int) -> None:
    """Ends the process as Python does, but for taking the interpreter apart.

    Threads of torch that still want the interpreter then are killed, and C++ aborts the process: a rank that
    has done all it had to do would have failed.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
