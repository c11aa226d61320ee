"""Where launchers agree: compare-and-set by several, and what happens when the one who serves it leaves."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tenplexfs.client.meeting import Meeting
from tenplexfs.errors import UnavailableError, UsageError
from tests.ports import free_port


@pytest.fixture
def place():
    return f"127.0.0.1:{free_port()}"


def test_one_of_many_wins_and_all_hear_of_it(place):
    meetings = [Meeting(place) for _ in range(8)]
    assert meetings[0].get("name") is None
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: meetings[n].swap("name", None, f"start {n}"), range(8)))
    (winner,) = set(found)
    assert meetings[3].swap("name", "another", "new") == winner
    assert meetings[3].swap("name", winner, "new") == "new"
    assert {each.get("name") for each in meetings} == {"new"}
    assert meetings[5].own_host() == "127.0.0.1"
    for each in reversed(meetings):
        each.close()


def test_when_who_serves_it_is_gone_another_on_that_host_does_and_a_name_of_before_gives_way(place):
    first, second = Meeting(place, linger_s=0), Meeting(place)
    assert first.swap("name", None, "one") == second.swap("name", None, "two") == "one"
    first.close()  # the second stays connected: not for ever
    with pytest.raises(UnavailableError, match="no launcher answers there"):
        second.get("name")
    assert second.get("name") is None  # it serves now
    assert second.swap("name", "one", "three") == "three"
    second.close()


def test_noise_ends_the_connection_that_made_it_only(place):
    meeting = Meeting(place)
    meeting.swap("name", None, "one")
    host, port = place.split(":")
    for noise in (
        b"GET / HTTP/1.0\r\n\r\n",
        b"{}\n",
        json.dumps({"name": 3}).encode() + b"\n",
    ):
        with socket.create_connection((host, int(port)), 10) as line, line.makefile("rb") as answers:
            line.sendall(noise)
            assert answers.read() == b""
    assert meeting.get("name") == "one"
    meeting.close()


def test_a_host_that_is_another_is_never_taken_for_this_one(monkeypatch):
    def refused(*_):
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(socket, "create_connection", refused)
    with pytest.raises(UnavailableError, match=r"rendezvous 192\.0\.2\.1:29400: no launcher answers there"):
        Meeting("192.0.2.1:29400").get("name")  # an address that nobody has


@pytest.mark.parametrize("wrong", ["host", "host:", ":1", "host:x", "host:70000"])
def test_a_place_is_a_host_and_a_port(wrong):
    with pytest.raises(UsageError, match="need HOST:PORT"):
        Meeting(wrong)
