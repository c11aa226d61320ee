"""Valid JSON documents with something wrong in them, and a guard against what never ends."""

from __future__ import annotations

import copy
import signal
from contextlib import contextmanager

from hypothesis import strategies as st

ODD = (
    -1, 0, 1, 7, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 1.5, 1e308, float("nan"),
    float("inf"), True, False, None, "", ".", "..", "/", "a" * 300, "\ud800", "\0", "\n", "{i}", "{i+1}", "é",
    "tp", "i",
    [], {}, [0], [[]], {"": 0}, [2**62, 2**62], [0] * 70, ["tp", "tp"], {"i": 2**40}, {"i": 3, "e": 2},
)  # fmt: skip
"""What readers of JSON forget."""

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def places(tree, here=()):
    """Yields the path of every value in a document."""
    yield here
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from places(value, (*here, key))


@st.composite
def mutated(draw, documents):
    """Draws one of ``documents`` with up to three values replaced, removed, copied elsewhere or renamed."""
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(1, 3))):
        spots = [place for place in places(document) if place]
        if not spots:
            return document
        *way, last = draw(st.sampled_from(spots))
        parent = document
        for key in way:
            parent = parent[key]
        match draw(st.sampled_from(["replace", "odd", "remove", "copy", "rename"])):
            case "replace":
                parent[last] = copy.deepcopy(draw(json_values))
            case "odd":
                parent[last] = copy.deepcopy(draw(st.sampled_from(ODD)))
            case "remove":
                del parent[last]
            case "copy":
                other = document
                for key in draw(st.sampled_from(spots)):
                    try:
                        other = other[key]
                    except (LookupError, TypeError):
                        break
                parent[last] = copy.deepcopy(other)
            case "rename" if isinstance(parent, dict):
                parent[draw(st.text(max_size=5) | st.sampled_from(["tp", "mesh", "i", ""]))] = parent.pop(
                    last
                )
    return document


@contextmanager
def within(seconds):
    """Fails what takes longer, also what would never end."""

    def late(*_):
        raise AssertionError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
