"""Several hosts on one machine: network namespaces behind a switch, with links of a given rate and delay."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Network", "network"]

MTU = 9000  # as networks of clusters have it; 1500 costs 4 % more in headers
RELAY = Path(__file__).with_name("relay.py")


def _run(*arguments: object) -> str:
    done = subprocess.run([*map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, arguments))}: {done.stderr.strip()}")
    return done.stdout


def _try(*arguments: object) -> bool:
    return not subprocess.run([*map(str, arguments)], capture_output=True, check=False).returncode


class Network:
    """Hosts with one interface each, all on one switch in a namespace of its own.

    Both directions of a link are shaped, at the host's end and at the switch's, by a token bucket. Without a
    delay, or where the kernel has netem, the switch is a bridge; else `relay` is, which holds each frame.

    Args:
        count: How many hosts.
        delay_ms: What a frame takes from one host to another, whatever its size.

    Attributes:
        count, delay_ms: As given.
    """

    def __init__(self, count: int, delay_ms: float = 0.0) -> None:
        self.count = count
        self._prefix = f"tpx{os.getpid()}"
        self._switch = f"{self._prefix}s"
        self._hosts = [f"{self._prefix}h{n}" for n in range(count)]
        self._ports = [f"p{n}" for n in range(count)]
        self.delay_ms = delay_ms
        self._relay: subprocess.Popen[str] | None = None
        self._has_netem = False

    @property
    def delayed_by(self) -> str:
        """Says what delays frames."""
        if not self.delay_ms:
            return "no delay"
        how = "netem" if self._has_netem else "a relay in user space (no netem here)"
        return f"{self.delay_ms:g} ms each way by {how}"

    @property
    def congestion_control(self) -> str:
        """Which of TCP's ways to find a link's rate the hosts use."""
        file = "/proc/sys/net/ipv4/tcp_congestion_control"
        return _run("ip", "netns", "exec", self._hosts[0], "cat", file).strip()

    def make(self) -> None:
        """Makes it, without limits."""
        for name in (self._switch, *self._hosts):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        for number, (host, port) in enumerate(zip(self._hosts, self._ports, strict=True)):
            peer = ("peer", "name", "eth0", "mtu", MTU, "netns", host)
            _run("ip", "-n", self._switch, "link", "add", port, "mtu", MTU, "type", "veth", *peer)
            _run("ip", "-n", self._switch, "link", "set", port, "up")
            _run("ip", "-n", host, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            _run("ip", "-n", host, "link", "set", "eth0", "up")
        self._has_netem = bool(self.delay_ms) and _try(
            *("tc", "-n", self._switch, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
        )
        if self.delay_ms and not self._has_netem:
            command = [
                "ip",
                "netns",
                "exec",
                self._switch,
                sys.executable,
                RELAY,
                self.delay_ms,
                *self._ports,
            ]
            self._relay = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)
            if self._relay.stdout.readline() != "ready\n":
                raise SystemExit("the relay did not start")
            return
        _run("ip", "-n", self._switch, "link", "add", "br0", "mtu", MTU, "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for port in self._ports:
            _run("ip", "-n", self._switch, "link", "set", port, "master", "br0")

    def clear(self) -> None:
        """Takes it away."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
        for name in (*self._hosts, self._switch):
            _try("ip", "netns", "delete", name)

    def address(self, host: int) -> str:
        """Returns the address of a host."""
        return f"10.77.0.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """Returns what a command begins with to run on a host."""
        return ["ip", "netns", "exec", self._hosts[host]]

    def limit(self, mbit_per_s: int | None) -> None:
        """Sets the rate of every link, both ways; None is no limit. The delay stays."""
        ends = [(self._switch, port) for port in self._ports]
        for name, device in (*ends, *((host, "eth0") for host in self._hosts)):
            where = ("tc", "-n", name, "qdisc")
            _try(*where, "delete", "dev", device, "root")
            parent: tuple[str, ...] = ("root",)
            if self._has_netem and name == self._switch:
                held = ("delay", f"{self.delay_ms}ms", "limit", "100000")
                _run(*where, "add", "dev", device, "root", "handle", "1:", "netem", *held)
                parent = ("parent", "1:1")
            if mbit_per_s is not None:
                shape = ("rate", f"{mbit_per_s}mbit", "burst", "256kb", "latency", "100ms")
                _run(*where, "add", "dev", device, *parent, "tbf", *shape)

    def received(self) -> list[int]:
        """Returns the bytes that each host has received so far, as the switch's ports count them."""
        links = json.loads(_run("ip", "-n", self._switch, "-json", "-statistics", "link"))
        sent = {link["ifname"].partition("@")[0]: link["stats64"]["tx"]["bytes"] for link in links}
        return [sent[port] for port in self._ports]


@contextmanager
def network(names: Sequence[str], delay_ms: float = 0.0) -> Iterator[Network]:
    """Gives a network with a host for each name; all of it is gone afterwards."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise SystemExit(f"{', '.join(missing)}: missing; install iproute2")
    made = Network(len(names), delay_ms)
    try:
        made.make()
        yield made
    finally:
        made.clear()
