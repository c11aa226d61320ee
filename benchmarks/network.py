"""Several hosts on one machine: network namespaces behind a switch, each with a link of a given rate."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["Network", "network"]

MTU = 9000  # as networks of clusters have it; 1500 costs 4 % more in headers


def _run(*arguments: object) -> str:
    done = subprocess.run([*map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, arguments))}: {done.stderr.strip()}")
    return done.stdout


class Network:
    """Hosts with one interface each, all on one bridge in a namespace of its own.

    Both directions of a link are shaped, at the host's end and at the switch's, by a token bucket.
    """

    def __init__(self, count: int) -> None:
        self._prefix = f"tpx{os.getpid()}"
        self._switch = f"{self._prefix}s"
        self._hosts = [f"{self._prefix}h{n}" for n in range(count)]

    def make(self) -> None:
        """Makes it, without limits."""
        for name in (self._switch, *self._hosts):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", self._switch, "link", "add", "br0", "mtu", MTU, "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for number, host in enumerate(self._hosts):
            port = f"p{number}"
            peer = ("peer", "name", "eth0", "mtu", MTU, "netns", host)
            _run("ip", "-n", self._switch, "link", "add", port, "mtu", MTU, "type", "veth", *peer)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", host, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            _run("ip", "-n", host, "link", "set", "eth0", "up")

    def clear(self) -> None:
        """Takes it away."""
        for name in (*self._hosts, self._switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def address(self, host: int) -> str:
        """Returns the address of a host."""
        return f"10.77.0.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """Returns what a command begins with to run on a host."""
        return ["ip", "netns", "exec", self._hosts[host]]

    def limit(self, mbit_per_s: int | None) -> None:
        """Sets the rate of every link, both ways; None is no limit."""
        ends = [(self._switch, f"p{number}") for number in range(len(self._hosts))]
        for name, device in (*ends, *((host, "eth0") for host in self._hosts)):
            where = ("tc", "-n", name, "qdisc")
            subprocess.run([*where, "delete", "dev", device, "root"], capture_output=True, check=False)
            if mbit_per_s is not None:
                shape = ("rate", f"{mbit_per_s}mbit", "burst", "256kb", "latency", "100ms")
                _run(*where, "add", "dev", device, "root", "tbf", *shape)

    def received(self) -> list[int]:
        """Returns the bytes that each host has received so far, as the switch's ports count them."""
        links = json.loads(_run("ip", "-n", self._switch, "-json", "-statistics", "link"))
        sent = {link["ifname"].partition("@")[0]: link["stats64"]["tx"]["bytes"] for link in links}
        return [sent[f"p{number}"] for number in range(len(self._hosts))]


@contextmanager
def network(names: Sequence[str]) -> Iterator[Network]:
    """Gives a network with a host for each name; all of it is gone afterwards."""
    made = Network(len(names))
    try:
        made.make()
        yield made
    finally:
        made.clear()
