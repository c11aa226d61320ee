"""What can be set, and what is set: flags, then environment, then files, all of one form.

A setting is the same word everywhere: ``--remote-reads off``, ``TENPLEXFS_REMOTE_READS=off``, and in a file
``remote_reads = "off"``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from tenplexfs.errors import UsageError

__all__ = ["SETTINGS", "Settings", "parse_size", "settings_of"]

SETTINGS: Mapping[str, str] = {
    "node": "Name of this node; default: the host name.",
    "mount": "Where the tree is mounted; default: /mnt/tenplexfs as root, else below XDG_RUNTIME_DIR.",
    "no_mount": "Serve without a mount (on or off).",
    "listen": "HOST:PORT for peers and control; default: 127.0.0.1:7070.",
    "advertise": "HOST:PORT where others reach this node; default: listen, by host name if it is 0.0.0.0.",
    "http": "HOST:PORT for Tenplex's clients, as 127.0.0.1:20010; default: none.",
    "peer": "NODE=HOST:PORT of another daemon; may be given several times.",
    "join": "Find peers and registry: HOST[:PORT] of a daemon, dns:NAME[:PORT], or slurm; instead of peer.",
    "registry": "The node whose daemon serves the registry, or etcd://HOST:PORT,...; default: this node.",
    "store": "Directory of the state, in memory; default: /run/tenplexfs/store as root, else below /dev/shm.",
    "socket": "Local socket; default: below /run/tenplexfs as root, else below XDG_RUNTIME_DIR.",
    "memory": "Limit of the store, as 8GiB, 8Gi or 50%; default: 25%.",
    "remote_reads": "Whether ranks of other nodes can be read here (on or off); default: on.",
    "read_timeout": "Seconds that a read waits for another node; default: 60.",
    "transfer_memory": "Memory that transfers between nodes may hold here, as memory; default: 256MiB.",
    "data_port": "Port beside that of --listen for the bytes between nodes; default: any free one.",
    "window": "Memory for the samples of a dataset that are fetched ahead, as memory; default: 1GiB.",
    "spill": "Directory on a disk, for open files of replaced snapshots when memory is short; default: none.",
    "retain": "Seconds that a replaced snapshot is kept for nodes that do not answer; default: 600.",
    "restore_from": "Directory or URL of persisted jobs; those that nobody knows are made of it.",
    "allow_other": "Let other users read the mount (on or off); default: off.",
    "tls": "Directory of tls init: mutual TLS for all that goes over TCP.",
    "token_file": "File with a word that every call over TCP must carry.",
    "insecure": "Listen on an address that is not loopback without TLS (on or off); default: off.",
}
"""Name of each setting and what it says, for whoever makes flags of them."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)


def settings_of(
    flags: Mapping[str, str | Sequence[str] | None], environ: Mapping[str, str], system_file: Path
) -> Settings:
    """Returns what is set.

    Args:
        flags: As given on the command line; what is None was not given.
        environ: The environment.
        system_file: Read last.

    Raises:
        UsageError: A setting is unknown, or a file cannot be read; says where.
    """
    home = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config")
    own = {name: environ.get(f"TENPLEXFS_{name.upper()}") for name in SETTINGS}
    return Settings(
        [
            ("flag", flags),
            ("environment", own),
            *((str(file), _read(file)) for file in (home / "tenplexfs" / "config.toml", system_file)),
        ]
    )


class Settings:
    """The value of each setting from the first place that has it.

    What gives a value raises UsageError where the one that was given is of another kind.

    Args:
        layers: Names of places, and what each has; the first counts most.

    Raises:
        UsageError: A place has a setting that there is not.
    """

    def __init__(self, layers: list[tuple[str, Mapping[str, object]]]) -> None:
        self._found: dict[str, tuple[str, object]] = {}
        for where, values in layers:
            for name, value in values.items():
                if name not in SETTINGS:
                    raise UsageError(f"{where}: {name}: no such setting; there are {', '.join(SETTINGS)}")
                if value is not None and value != () and name not in self._found:
                    self._found[name] = (where, value)

    def text(self, name: str) -> str | None:
        """Returns one value, or None where it is not set."""
        if name not in self._found:
            return None
        value = self._found[name][1]
        if isinstance(value, bool):
            return "on" if value else "off"
        if not isinstance(value, str | int | float):
            raise UsageError(f"{name}: need one value, got {value!r}")
        return str(value)

    def texts(self, name: str) -> list[str]:
        """Returns several values, separated by commas or blanks where they are one text."""
        if name not in self._found:
            return []
        value = self._found[name][1]
        if isinstance(value, str):
            return [part for part in re.split(r"[,\s]+", value) if part]
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise UsageError(f"{name}: need a list of texts, got {value!r}")
        return list(value)

    def switch(self, name: str, *, default: bool) -> bool:
        """Returns whether it is on."""
        text = self.text(name)
        if text is None:
            return default
        if text.lower() in ("on", "true", "yes", "1"):
            return True
        if text.lower() in ("off", "false", "no", "0"):
            return False
        raise UsageError(f"{name}: need on or off, got {text!r}")

    def seconds(self, name: str, default: float) -> float:
        """Returns seconds, more than none."""
        text = self.text(name)
        try:
            value = default if text is None else float(text.removesuffix("s"))
        except ValueError:
            value = -1.0
        if not 0 < value < 1e9:
            raise UsageError(f"{name}: need seconds > 0, got {text!r}")
        return value

    def port(self, name: str, *, default: int) -> int:
        """Returns a port."""
        text = self.text(name)
        if text is None:
            return default
        if not (text.isdecimal() and int(text) < 1 << 16):
            raise UsageError(f"{name}: need a port, got {text!r}")
        return int(text)

    def size(self, name: str, default: str, *, of_bytes: int) -> int:
        """Returns bytes; a share is of ``of_bytes``."""
        return parse_size(self.text(name) or default, of_bytes=of_bytes, what=name)

    def named_in(self, message: str) -> str:
        """Returns a message that begins with a setting, with what somebody wrote it as in its place.

        >>> Settings([("flag", {"read_timeout": "x"})]).named_in("read_timeout: need seconds")
        '--read-timeout: need seconds'
        """
        name = re.match(r"\w*", message)[0]  # type: ignore[index]
        if name not in self._found:
            return message
        where, rest = self._found[name][0], message.removeprefix(name)
        flag, variable = f"--{name.replace('_', '-')}", f"TENPLEXFS_{name.upper()}"
        return {"flag": flag, "environment": variable}.get(where, f"{where}: {name}") + rest


def parse_size(text: str, *, of_bytes: int, what: str = "memory") -> int:
    """Returns bytes: ``8GiB`` and ``8Gi`` are binary, ``8GB`` and ``8G`` decimal, ``50%`` is of ``of_bytes``.

    >>> parse_size("8GiB", of_bytes=0), parse_size("8Gi", of_bytes=0), parse_size("50%", of_bytes=10)
    (8589934592, 8589934592, 5)

    Raises:
        UsageError: It is no size, or nothing.
    """
    stripped = text.strip()
    if stripped.endswith("%"):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", stripped)
        size = int(of_bytes * float(match[1]) / 100) if match and float(match[1]) <= 100 else 0
    else:
        match = _SIZE.fullmatch(stripped)
        power = " KMGT".index((match[2] or " ").upper()) if match else 0
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** power) if match else 0
    if size <= 0:
        raise UsageError(f"{what} {text!r}: need a size as 8GiB, 8Gi, 500MB or 50%")
    return size


def _read(file: Path) -> Mapping[str, object]:
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: {error}") from error
