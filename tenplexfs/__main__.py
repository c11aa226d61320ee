"""The command ``tenplexfs``: ``python -m tenplexfs`` is the same."""

from __future__ import annotations

import os
import sys

from tenplexfs.client import commands

__all__ = ["main"]


def main() -> None:
    """Runs the command line and exits with its status."""
    if (given := commands.of_base_install(sys.argv[1:])) is not None:
        raise SystemExit(commands.run(given))
    # Else gRPC writes a line for each try of a handshake; what it says of one comes with our own errors.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from tenplexfs.cli.app import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "tenplexfs":
            raise
        sys.stderr.write(
            f"tenplexfs: this command needs the daemon's packages ({error.name} is missing):"
            " pip install 'tenplexfs[daemon]'\n"
        )
        raise SystemExit(1) from None
    raise SystemExit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
