"""What `tenplexfs run` lets torchrun start for each rank: the training script, under the rank of the layout.

A script that ends with `EXIT_RECONFIGURE` ends well for torchrun, which would kill the other ranks otherwise;
the launcher reads in a note how it ended.
"""

from __future__ import annotations

import os
import runpy
import sys
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
    status: int | str | None = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code
        if status != EXIT_RECONFIGURE:
            raise
    finally:
        note.write_text(str(status if isinstance(status, int) else int(status is not None)))


if __name__ == "__main__":
    main()
