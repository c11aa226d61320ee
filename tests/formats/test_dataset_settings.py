"""Cursors as settings carry them, over saves, reconfigurations, fallbacks and imports."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenplexfs.core.cursor import Cursor, Extent, Tail
from tenplexfs.core.datasets import DatasetState, spread_of
from tenplexfs.core.partition import DegreeError
from tenplexfs.errors import CorruptError, InvalidError, NotFoundError
from tenplexfs.formats.dataset_settings import (
    begin_datasets,
    check_dataset_name,
    datasets_of,
    give_cursors,
    plain_settings,
    plan_datasets,
    put_datasets,
    skip_samples,
)
from tenplexfs.formats.layout_json import parse_layout


def layout(dp=2, batch=4, **dataset):
    section = {"axis": "dp", "global_batch": batch, **dataset}
    return json.dumps(
        {"format": "tenplexfs-layout", "version": 1, "mesh": {"dp": dp}, "tensors": {}, "dataset": section}
    ).encode()


def state(count=100, name="train", **changes):
    fields = {
        "name": name,
        "digest": "0" * 32,
        "index_bytes": 1,
        "kind": "npy",
        "sources": ("/a b", "s3://ü"),
        "added_by": "node0",
        "count": count,
        "unsplit": False,
        "shuffle": True,
        "own_batch": None,
        "own_tail": None,
        "tail": Tail.DROP,
        "start": Cursor(0, 0, 4, 7),
        "start_step": 0,
    }
    return DatasetState(**{**fields, **changes})


def cursor(text, step, name="train"):
    found = datasets_of(text)[name].cursor_at(step)
    return found.epoch, found.consumed, found.global_batch


def test_settings_go_there_and_back_and_plain_ones_stay():
    states = [
        state(),
        state(name="valid", unsplit=True, given=None),
        state(name="b", given=(3, Cursor(0, 5, 4, 7))),
    ]
    text = put_datasets(b'{"keep_steps": 2}', states)
    assert list(datasets_of(text).values()) == states
    assert plain_settings(text) == b'{"keep_steps": 2}'
    assert datasets_of(b"{}") == datasets_of(b"") == {}
    assert put_datasets(text, []) == b'{"keep_steps": 2}'
    with pytest.raises(CorruptError, match="digest"):
        datasets_of(json.dumps({"datasets": [["a", {"given": None}]]}).encode())


def test_batch_4_for_3_steps_then_8_by_a_reconfiguration_then_a_save_that_skipped():
    text = put_datasets(b"{}", [state()])
    assert cursor(text, 3) == (0, 12, 4)
    text = begin_datasets(text, 3, 3, layout(batch=8))
    assert cursor(text, 3) == (0, 12, 8)
    assert cursor(text, 5) == (0, 28, 8)
    text = give_cursors(text, 6, 50)
    assert (cursor(text, 5), cursor(text, 6), cursor(text, 7)) == ((0, 28, 8), (0, 50, 8), (0, 58, 8))
    assert datasets_of(text)["train"].start.consumed == 12  # row 0 does not move on a save
    text = begin_datasets(text, 7, 7, layout(dp=1, batch=8))
    assert datasets_of(text)["train"].start.consumed == 58


def test_going_back_to_a_step_goes_back_to_its_cursor():
    at_100 = put_datasets(b"{}", [state(count=10_000)])
    at_200 = give_cursors(at_100, 200, 1000)
    assert cursor(at_200, 200) == (0, 1000, 4)
    assert cursor(begin_datasets(at_100, 100, 100, layout()), 100) == (0, 400, 4)


def test_state_from_outside_begins_where_the_job_was():
    text = begin_datasets(put_datasets(b"{}", [state()]), 5, 900, layout())
    assert (cursor(text, 900), cursor(text, 901)) == ((0, 20, 4), (0, 24, 4))


def test_skipping_goes_over_the_end_of_an_epoch():
    text = skip_samples(put_datasets(b"{}", [state()]), 5, 90)
    assert cursor(text, 5) == (1, 10, 4)
    assert datasets_of(text)["train"].start.consumed == 0


def test_sets_that_are_unsplit_never_move():
    text = put_datasets(b"{}", [state(name="valid", unsplit=True), state()])
    text = begin_datasets(text, 9, 9, layout(dp=3, batch=6))
    assert cursor(text, 20, "valid") == (0, 0, 4)
    valid = datasets_of(text)["valid"]
    rows = valid.partition(2, spread_of(parse_layout(layout(dp=3, batch=6)))).rank(0)
    assert rows.count == 100


def test_refusals_name_the_dataset_and_the_values():
    text = put_datasets(b"{}", [state(), state(name="other")])
    with pytest.raises(DegreeError, match=r"dataset train: global batch 4: 3 ranks .* are 1, 2, 4"):
        begin_datasets(text, 0, 0, layout(dp=3))
    with pytest.raises(DegreeError, match="dataset train"):
        plan_datasets(text, 0, layout(), layout(dp=3))
    with pytest.raises(InvalidError, match="name the dataset; split are: train, other"):
        give_cursors(text, 1, 8)
    with pytest.raises(NotFoundError, match="dataset none: no such dataset; there are: train, other"):
        give_cursors(text, 1, {"none": 8})
    with pytest.raises(InvalidError, match="consumed 101"):
        give_cursors(text, 1, {"train": 101})
    bare = json.dumps({"format": "tenplexfs-layout", "version": 1, "mesh": {"dp": 2}, "tensors": {}}).encode()
    with pytest.raises(InvalidError, match="dataset train: no global batch"):
        begin_datasets(text, 0, 0, bare)
    with pytest.raises(InvalidError, match="dataset name"):
        check_dataset_name("../x")
    for context in ({"axis": "dp", "order": "spiral"}, {"dim": 0}, {"axis": "dp", "dim": "0"}):
        with pytest.raises(InvalidError, match="context"):
            spread_of(parse_layout(layout(context=context)))


def test_what_the_dataset_was_given_wins_over_the_layout():
    own = state(own_batch=10, own_tail=Tail.KEEP, start=Cursor(0, 0, 10, 7))
    text = begin_datasets(put_datasets(b"{}", [own]), 1, 1, layout(batch=8, tail="drop"))
    found = datasets_of(text)["train"]
    assert (found.start, found.tail) == (Cursor(0, 10, 10, 7), Tail.KEEP)
    plan = plan_datasets(text, 1, layout(), layout(dp=5))["train"]
    assert plan["degree"] == {"old": 2, "new": 5}
    assert (plan["local_batch"], plan["samples_left"], plan["dropped"]) == (2, 90, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(9, 80),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, 2, 3, 4, 6, 8])), max_size=8),
    st.sampled_from(Tail),
)
def test_derived_cursors_are_those_that_advance_step_by_step(count, changes, tail):
    extent = Extent(count, tail)
    text = put_datasets(b"{}", [state(count=count, tail=tail, own_tail=tail)])
    here, step = Cursor(0, 0, 4, 7), 0
    for steps, batch in changes:
        for _ in range(steps):
            here, step = here.advance(1, extent), step + 1
            assert datasets_of(text)["train"].cursor_at(step) == here
        text = begin_datasets(text, step, step, layout(dp=1, batch=batch))
        here = here.with_batch(batch, extent)
        assert datasets_of(text)["train"].cursor_at(step) == here
