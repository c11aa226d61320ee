"""Ports for servers that are started, and started again, by tests."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_BELOW = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def free_port() -> int:
    """Returns a port that the kernel gives nobody else before it is bound: none that outgoing calls have."""
    while True:
        port = random.randrange(_BELOW // 2, _BELOW)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
