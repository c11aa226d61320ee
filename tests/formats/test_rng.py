"""Random-number states that are derived for new ranks: their generators take them, and draw other numbers."""

import random

import numpy as np
import pytest
import torch

from tenplexfs.client.arrays import source_of
from tenplexfs.formats.leaves import decode_leaf, encode_leaf
from tenplexfs.formats.rng import derive, is_random_state
from tenplexfs.formats.structure import flatten, unflatten
from tenplexfs.formats.values import Values, regroup, values_by_rank
from tenplexfs.torch import LocalTensor, rng_state, set_rng_state


def seeded(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    np.random.standard_normal()  # so that one is held back
    torch.randn(5)
    return rng_state()


def draws():
    return random.random(), np.random.standard_normal(), *torch.randn(3).tolist(), torch.rand(1).item()


def drawn_from(state):
    set_rng_state(state)
    return draws()


def values(*states):
    return Values({rank: flatten(state, source_of).document for rank, state in enumerate(states)})


def states(found):
    return [unflatten(found.documents[rank], lambda path: path) for rank in sorted(found.documents)]


def test_a_rank_that_lives_on_keeps_its_own_and_a_new_one_gets_another():
    olds = [{"rng": seeded(seed), "lr": 0.1, "own": seed} for seed in (1, 2)]
    wanted = [drawn_from(old["rng"]) for old in olds]
    more = states(regroup(values(*olds), [()] * 5))
    assert more[:2] == olds
    found = [drawn_from(state["rng"]) for state in more]
    assert found[:2] == wanted
    for place in range(len(wanted[0])):
        assert len({each[place] for each in found}) == 5, (
            "every generator of every rank draws its own numbers"
        )
    assert [state["own"] for state in more] == [1, 2, 1, 2, 1]
    assert states(regroup(values(*olds), [()] * 5)) == more, "the same change gives the same states"
    assert states(regroup(values(*more), [()] * 2)) == olds
    assert states(regroup(values(olds[0]), [()] * 3))[1]["rng"] != olds[0]["rng"], "an only rank's is its own"


def test_what_ranks_have_in_common_stays_common():
    state = {"rng": seeded(3), "step": 7, "schedule": {"last_epoch": 7, "base_lrs": [0.1, 0.2]}}
    old = values(state, state)
    assert states(regroup(old, [()] * 4)) == [state] * 4
    assert list(values_by_rank(old, 4)) == []


def test_the_plan_says_how_each_own_value_comes_to_each_rank():
    olds = [
        {"rng": {"torch": seeded(seed)["torch"], "odd": f"{seed}"}, "own": seed, "lr": 1} for seed in (1, 2)
    ]
    found = list(values_by_rank(values(*olds), 3))
    assert [each for each in found if each["path"] == "own"] == [
        {"path": "own", "target_rank": 0, "source_rank": 0},
        {"path": "own", "target_rank": 1, "source_rank": 1},
        {"path": "own", "target_rank": 2, "source_rank": 0},
    ]
    assert {"path": "rng/torch", "target_rank": 2, "derived": True} in found
    assert {"path": "rng/torch", "target_rank": 1, "source_rank": 1} in found
    # Of no known form: it is told that the new rank has the old one's.
    assert {"path": "rng/odd", "target_rank": 2, "source_rank": 0} in found
    assert len(found) == 9 and list(values_by_rank(Values(), 3)) == []


def new(path, value, rank=3):
    leaf = derive(path, encode_leaf(value, pickled=False, refuse=True), rank)
    return None if leaf is None else decode_leaf(leaf, allow_pickle=False)


def test_other_forms():
    state = torch.Generator().manual_seed(5).get_state()
    local = new("rng", LocalTensor("uint8", tuple(state.shape), state.numpy().tobytes()))
    assert type(local) is LocalTensor
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(local.data), dtype=torch.uint8))
    assert torch.rand(1, generator=generator) != torch.rand(1, generator=torch.Generator().manual_seed(5))
    cuda = new("cuda_rng_state", (5).to_bytes(8, "little") + (40).to_bytes(8, "little"))
    assert cuda[8:] == bytes(8) and cuda[:8] not in (bytes(8), (5).to_bytes(8, "little"))
    pcg = np.random.default_rng(5)
    kept = pcg.bit_generator.state
    kept["state"]["state"] = new("rng/state/state", kept["state"]["state"])
    pcg.bit_generator.state = kept
    assert pcg.random() != np.random.default_rng(5).random()


@pytest.mark.parametrize("value", [b"", bytes(17), 5, "text", None, (3, (1, 2), None), 0.5, {"a"}])
def test_what_has_no_known_form_is_not_derived(value):
    assert new("rng", value) is None


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("rng", True),
        ("rng/torch", True),
        ("loader/RNG_state/0", True),
        ("np_rng_state", True),
        ("rng%2E1", True),
        ("string", False),
        ("wrong/x", False),
        ("rngs", False),
    ],
)
def test_paths_of_random_states(path, is_one):
    assert is_random_state(path) == is_one


def test_states_that_came_as_lists_are_derived_as_lists():
    np.random.seed(5)
    kind, words, *rest = np.random.get_state()
    own = {
        "rng_state": [
            {
                "random_rng_state": [3, list(random.Random(5).getstate()[1]), None],
                "np_rng_state": [kind, LocalTensor("uint32", (624,), words.tobytes()), *rest],
            }
        ]
    }
    old, new = (state["rng_state"][0] for state in states(regroup(values(own), [()] * 2)))
    assert old == own["rng_state"][0]
    version, numbers, gauss = new["random_rng_state"]
    made = random.Random()
    made.setstate((version, tuple(numbers), gauss))
    assert made.random() != random.Random(5).random()
    kind, array, *rest = new["np_rng_state"]
    np.random.set_state((kind, np.frombuffer(array.data, np.uint32), *rest))
    drawn = np.random.random_sample()
    np.random.seed(5)
    assert drawn != np.random.random_sample()
