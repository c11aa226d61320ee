"""The command ``tenplexfs``: ``python -m tenplexfs`` is the same."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line and exits with its status."""
    if sys.argv[1:2] == ["run"]:  # in the base install
        from tenplexfs.client.launch import main as launch

        raise SystemExit(launch(sys.argv[2:]))
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
