"""Streams that leave together go on evenly, and nobody waits for long."""

import socket
from contextlib import ExitStack

import numpy as np
import pytest

from tenplexfs.rpc.turns import Turns
from tenplexfs.rpc.wire import FetchRequest
from tenplexfs.runtime.protocols import Ranges

MIB = 1 << 20


def request_of(nbytes, txid="a"):
    return FetchRequest("j", txid, 0, (Ranges(0, "w", 1, np.array([[[0], [nbytes]]])),))


class Time:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds

    def took(self, call, *arguments):
        begin = self.now
        call(*arguments)
        return self.now - begin


@pytest.fixture
def fds():
    with ExitStack() as stack:
        yield [stack.enter_context(socket.socket()).fileno() for _ in range(3)]


def test_one_that_is_ahead_waits_a_moment_until_the_others_come_after(fds):
    clock = Time()
    turns, took = Turns(clock=lambda: clock.now, sleep=clock.sleep), clock.took
    with turns.stream(fds[0], request_of(8 * MIB), are_whole=True) as sent:
        assert took(sent, 3 * MIB) == 0, "it is alone"
        with turns.stream(fds[1], request_of(8 * MIB), are_whole=True) as others:
            assert took(others, 0) == 0, "it begins where the first one is"
            assert took(sent, MIB) == 0
            assert 0.19 < took(sent, MIB) < 0.22, "too far ahead"
            assert took(others, 2 * MIB) == 0
            assert took(sent, 0) == 0
            with turns.stream(fds[2], request_of(8 * MIB, "b"), are_whole=True) as elsewhere:
                assert took(elsewhere, 5 * MIB) == 0, "of another snapshot"
            for _ in range(4):
                sent(MIB)
            assert took(sent, MIB) == 0, "the other one is slow for reasons of its own"
        assert took(sent, MIB) == 0, "it is alone again"


@pytest.mark.parametrize(("nbytes", "are_whole"), [(MIB, True), (8 * MIB, False)])
def test_what_is_short_or_passed_on_waits_for_nobody(fds, nbytes, are_whole):
    clock = Time()
    turns = Turns(clock=lambda: clock.now, sleep=clock.sleep)
    with (
        turns.stream(fds[0], request_of(8 * MIB), are_whole=True),
        turns.stream(fds[1], request_of(nbytes), are_whole=are_whole) as sent,
    ):
        assert clock.took(sent, 3 * MIB) == 0
