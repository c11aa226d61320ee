"""Telling the service manager: sd_notify, without its library.

Source: systemd's sd_notify(3); a datagram to the socket that ``NOTIFY_SOCKET`` names.
"""

from __future__ import annotations

import os
import socket

__all__ = ["sd_notify"]


def sd_notify(state: str) -> None:
    """Sends ``state``, as ``READY=1`` or ``STOPPING=1``; without a service manager nothing happens."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(state.encode(), address)
        except OSError:  # nobody listens any more, and there is nobody to tell
            return
