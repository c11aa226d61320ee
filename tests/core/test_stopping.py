"""Never two answers for one step, whatever the delays: simulated ranks, desks and a coordinator."""

from __future__ import annotations

import random

import pytest

from tenplexfs.core.stopping import Agreement, Desk, Told, agree
from tenplexfs.errors import ConflictError


def test_the_stop_is_beyond_what_any_rank_was_told():
    desks = Desk(), Desk()
    assert desks[0].ask(0, "a", 7) is False
    assert desks[1].ask(1, "b", 9) is False
    told = [desk.hold("t") for desk in desks]
    assert agree(told, 2) == 10
    assert desks[0].ask(0, "a", 8) is None
    for desk in desks:
        desk.publish("t", 10)
    assert [desks[0].ask(0, "a", step) for step in (8, 9, 10, 11)] == [False, False, True, True]
    assert [desks[1].ask(1, "b", step) for step in (9, 10)] == [False, True]


def test_nothing_is_agreed_before_all_are_known():
    assert agree([Told({}), Told({})], 2) is Agreement.NOBODY_ASKS
    assert agree([Told({0: 3}), Told({})], 2) is Agreement.NOT_ALL_KNOWN
    assert agree([Told({0: 3}, for_all=True), Told({})], 2) == 4


def test_a_desk_that_was_restarted_learns_from_the_next_question():
    desk = Desk()
    assert desk.hold("t").steps == {}
    assert desk.ask(0, "a", 12) is None
    assert desk.hold("t").steps == {0: 11}
    desk.publish("t", 12)
    assert desk.ask(0, "a", 12) is True


def test_released_answers_go_on_and_another_token_is_refused():
    desk = Desk()
    desk.ask(0, "a", 1)
    desk.hold("t")
    with pytest.raises(ConflictError):
        desk.hold("u")
    desk.release("u")
    assert desk.is_held
    desk.release("t")
    assert desk.ask(0, "a", 2) is False
    with pytest.raises(ConflictError):
        desk.publish("t", 2)


def test_who_was_told_of_a_stop_stays_told_and_a_new_process_runs():
    desk = Desk()
    desk.ask(0, "a", 1)
    desk.hold("t")
    desk.publish("t", 2)
    desk.clear()
    assert desk.ask(0, "a", 2) is True
    assert desk.ask(0, "b", 2) is False
    assert desk.hold("u").steps == {0: 2}


@pytest.mark.parametrize("seed", range(300))
def test_four_ranks_with_random_delays_never_hear_two_answers(seed):
    """Each turn one random thing happens: a rank asks, a desk is restarted, a message of the stop arrives."""
    rng = random.Random(seed)
    desks = [Desk(), Desk()]
    step, ended = [0] * 4, [False] * 4
    answers: dict[int, set[bool]] = {}
    held: dict[int, Told] = {}
    stop_at = None
    unpublished = {0, 1}
    lockstep = rng.random() < 0.5
    begin = rng.randrange(60)
    for turn in range(3000):
        rank = rng.randrange(4)
        ahead = lockstep and step[rank] > min(s for s, e in zip(step, ended, strict=True) if not e)
        if not ended[rank] and not ahead:
            answer = desks[rank // 2].ask(rank, f"p{rank}", step[rank])
            if answer is not None:
                answers.setdefault(step[rank], set()).add(answer)
                ended[rank] = answer
                step[rank] += 1
        if turn >= begin and stop_at is None and rng.random() < 0.3:
            node = rng.randrange(2)
            if rng.random() < 0.1 and node not in held:
                desks[node] = Desk()  # killed, before it heard of the stop
            held[node] = desks[node].hold("t")
            if len(held) == 2:
                held = {n: desks[n].hold("t") for n in held}
                found = agree(held.values(), 4)
                if isinstance(found, int):
                    stop_at = found
                elif rng.random() < 0.2:  # else a rank that waits for others, who are held, never asks
                    for desk in desks:
                        desk.release("t")
                    held.clear()
        if stop_at is not None and unpublished and rng.random() < 0.1:
            desks[unpublished.pop()].publish("t", stop_at)
        if all(ended):
            break
    assert all(ended)
    assert all(len(each) == 1 for each in answers.values()), answers
    assert {s for s, each in answers.items() if each == {True}} == {stop_at}
