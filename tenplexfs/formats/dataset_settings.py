"""The datasets of a job among its settings: ``{"keep_steps": 2, "datasets": [[name, {...}], ...]}``.

They travel where the settings travel: with every snapshot, to every node, into every manifest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tenplexfs.core.cursor import Cursor, Tail
from tenplexfs.core.datasets import DatasetState, spread_of
from tenplexfs.errors import CorruptError, InvalidError, NotFoundError
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.formats.requests import without_requests

__all__ = [
    "begin_datasets",
    "check_dataset_name",
    "datasets_back",
    "datasets_of",
    "give_cursors",
    "plain_settings",
    "plan_datasets",
    "put_datasets",
    "skip_samples",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)


def check_dataset_name(text: str) -> str:
    """Returns ``text`` as the name of a dataset.

    Raises:
        InvalidError: It is not ``[A-Za-z0-9][A-Za-z0-9_.-]{0,63}``.
    """
    if not _NAME.fullmatch(text):
        raise InvalidError(f"dataset name {text!r}: need [A-Za-z0-9][A-Za-z0-9_.-]{{0,63}}")
    return text


def plain_settings(settings_json: bytes) -> bytes:
    """Returns the settings without the datasets: what a person gave."""
    settings = _settings(without_requests(settings_json))
    settings.pop("datasets", None)
    return json.dumps(settings, sort_keys=True).encode()


def datasets_of(settings_json: bytes) -> dict[str, DatasetState]:
    """Returns the datasets among the settings, in the order in which they were added.

    Raises:
        CorruptError: They are not as `put_datasets` writes them.
    """
    try:
        return {name: _decode(name, entry) for name, entry in _settings(settings_json)["datasets"]}
    except KeyError as error:
        if error.args == ("datasets",):
            return {}
        raise CorruptError(f"settings: datasets: {error} is missing") from error
    except (InvalidError, ValueError, TypeError) as error:
        raise CorruptError(f"settings: datasets: {error}") from error


def put_datasets(settings_json: bytes, states: Iterable[DatasetState]) -> bytes:
    """Returns the settings with exactly these datasets."""
    settings = _settings(settings_json)
    settings.pop("datasets", None)
    entries = [[state.name, _encode(state)] for state in states]
    return json.dumps({**settings, **({"datasets": entries} if entries else {})}, sort_keys=True).encode()


def begin_datasets(settings_json: bytes, old_step: int | None, step: int | None, layout_json: bytes) -> bytes:
    """Returns the settings of a new generation: every dataset begins where it was after ``old_step``.

    Args:
        settings_json: Of the snapshot that the new one comes after.
        old_step: Of that snapshot.
        step: At which the new generation begins; another one for state from outside.
        layout_json: Of the new generation, complete.

    Raises:
        InvalidError: The new layout does not go with a dataset: names it, and the degrees that do.
    """
    states = datasets_of(settings_json)
    if not states:
        return settings_json
    spread = spread_of(parse_layout(layout_json))
    begun = [state.begun(state.cursor_at(old_step), step, spread) for state in states.values()]
    return put_datasets(settings_json, begun)


def datasets_back(settings_json: bytes, then_json: bytes) -> bytes:
    """Returns the settings with every dataset where it was in those of an earlier snapshot of the job.

    One that was added since then begins where it began.
    """
    then = datasets_of(then_json)
    states = datasets_of(settings_json)
    for name, state in states.items():
        if name in then and then[name].digest == state.digest:
            states[name] = then[name]
    return put_datasets(settings_json, states.values())


def give_cursors(settings_json: bytes, step: int, consumed: int | Mapping[str, int]) -> bytes:
    """Returns the settings of a save of ``step`` that says how many samples of the epoch are consumed.

    Args:
        settings_json: Of the snapshot before.
        step: That is saved.
        consumed: Of the one dataset that is split, or of each by name.

    Raises:
        InvalidError: An epoch has fewer samples, or it is not clear which dataset is meant.
        NotFoundError: There is no such dataset.
    """
    states = datasets_of(settings_json)
    if not states:  # the trainer's own business
        return settings_json
    if isinstance(consumed, int):
        split = [name for name, state in states.items() if not state.unsplit]
        if len(split) != 1:
            raise InvalidError(
                f"consumed {consumed}: name the dataset; split are: {', '.join(split) or 'none'}"
            )
        consumed = {split[0]: consumed}
    for name, count in consumed.items():
        if name not in states:
            raise NotFoundError(f"dataset {name}: no such dataset; there are: {', '.join(states) or 'none'}")
        states[name] = states[name].with_given(step, count)
    return put_datasets(settings_json, states.values())


def skip_samples(settings_json: bytes, step: int, samples: int) -> bytes:
    """Returns the settings with every split dataset ``samples`` positions on from its place at ``step``."""
    states = datasets_of(settings_json)
    for name, state in states.items():
        if samples and not state.unsplit:
            cursor = state.cursor_at(step).skip(samples, state.extent)
            states[name] = state.with_given(step, cursor.consumed, cursor.epoch)
    return put_datasets(settings_json, states.values())


def plan_datasets(
    settings_json: bytes, step: int | None, old_layout_json: bytes, new_layout_json: bytes
) -> dict[str, object]:
    """Returns the dataset section of a plan: for each one cursor, batch and degrees before and after.

    Raises:
        InvalidError: The new layout does not go with a dataset.
    """
    states = datasets_of(settings_json)
    if not states:
        return {}
    old, new = (spread_of(parse_layout(text)) for text in (old_layout_json, new_layout_json))
    plan: dict[str, object] = {}
    for name, state in states.items():
        cursor = state.cursor_at(step)
        after = state.begun(cursor, step, new)
        part = after.partition(after.start.epoch, new)
        plan[name] = {
            "cursor": after.start.to_json(),
            "unsplit": state.unsplit,
            "degree": {"old": old.degree, "new": new.degree},
            "global_batch": {"old": cursor.global_batch, "new": after.start.global_batch},
            "local_batch": part.rank(0).local_batch,
            "samples": state.count,
            "samples_left": part.samples,
            "dropped": len(part.dropped),
        }
    return plan


def _settings(settings_json: bytes) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(settings_json or b"{}")
    return settings


def _encode(state: DatasetState) -> dict[str, object]:
    given = None if state.given is None else [state.given[0], state.given[1].to_json()]
    return {
        "digest": state.digest,
        "index_bytes": state.index_bytes,
        "kind": state.kind,
        "sources": list(state.sources),
        "added_by": state.added_by,
        "count": state.count,
        "unsplit": state.unsplit,
        "shuffle": state.shuffle,
        "own_batch": state.own_batch,
        "own_tail": state.own_tail,
        "tail": state.tail,
        "start": state.start.to_json(),
        "start_step": state.start_step,
        "given": given,
    }


def _decode(name: str, entry: Mapping[str, Any]) -> DatasetState:
    given = entry["given"]
    return DatasetState(
        name=check_dataset_name(name),
        digest=str(entry["digest"]),
        index_bytes=int(entry["index_bytes"]),
        kind=str(entry["kind"]),
        sources=tuple(map(str, entry["sources"])),
        added_by=str(entry["added_by"]),
        count=int(entry["count"]),
        unsplit=bool(entry["unsplit"]),
        shuffle=bool(entry["shuffle"]),
        own_batch=entry["own_batch"],
        own_tail=None if entry["own_tail"] is None else Tail(entry["own_tail"]),
        tail=Tail(entry["tail"]),
        start=Cursor.from_json(entry["start"]),
        start_step=int(entry["start_step"]),
        given=None if given is None else (int(given[0]), Cursor.from_json(given[1])),
    )
