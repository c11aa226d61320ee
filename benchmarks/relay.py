"""A switch in user space that holds every frame for a while: what netem does, where the kernel has none.

    ip netns exec SWITCH python benchmarks/relay.py DELAY_MS PORT...

Frames are whole segments of up to 64 KiB, with what the kernel says of their checksums (`PACKET_VNET_HDR`),
so that a second of a fast link is some thousand of them. Says "ready" once it carries.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress

_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING = 263, 15, 23
_SNDBUFFORCE, _RCVBUFFORCE = 32, 33
_BUFFER_BYTES = 64 << 20
_FRAME_BYTES = 10 + 14 + (1 << 16)
_TARGET, _SOURCE = slice(10, 16), slice(16, 22)  # after the kernel's header
_AT_ONCE = 16


def _opened(port: str) -> socket.socket:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK)
    sock.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    sock.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    for buffer in (_SNDBUFFORCE, _RCVBUFFORCE):
        sock.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER_BYTES)
    sock.bind((port, 3))
    return sock


def carry(delay_s: float, ports: list[str]) -> None:
    """Carries frames between ``ports``, each ``delay_s`` after it came; never returns."""
    every = [_opened(port) for port in ports]
    known: dict[bytes, socket.socket] = {}
    held: deque[tuple[float, socket.socket, bytes]] = deque()
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        for sock in select.select(every, (), (), wait_s)[0]:
            due_s = time.monotonic() + delay_s
            with suppress(BlockingIOError):
                for _ in range(_AT_ONCE):
                    held.append((due_s, sock, sock.recv(_FRAME_BYTES)))
        now_s = time.monotonic()
        while held and held[0][0] <= now_s:
            _, came_by, frame = held.popleft()
            known[frame[_SOURCE]] = came_by
            goes_by = known.get(frame[_TARGET])
            for sock in every if goes_by is None else (goes_by,):
                if sock is not came_by:
                    with suppress(OSError):  # the port's queue is full: lost, as at any switch
                        sock.send(frame)


if __name__ == "__main__":
    with suppress(PermissionError):  # like the kernel's own work, it comes first
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    carry(float(sys.argv[1]) / 1000, sys.argv[2:])
