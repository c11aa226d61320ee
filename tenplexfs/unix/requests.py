"""What a message of a training process says, checked field by field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.snapshot import check_job_name
from tenplexfs.errors import InvalidError
from tenplexfs.runtime.attempts import SaveRequest
from tenplexfs.runtime.save_parts import Tensors

__all__ = ["field", "optional", "save_request", "sums_of"]

T = TypeVar("T")
Message = Mapping[str, Any]

_MAX_NDIM = 64
_MAX_TENSORS = 1 << 20


def field(message: Message, name: str, kind: type[T]) -> T:
    """Returns a field.

    Raises:
        InvalidError: It is missing, or of another type.
    """
    value = message.get(name)
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise InvalidError(f"{message.get('op')}: {name}: need {kind.__name__}, got {value!r:.100}")
    return value


def optional(message: Message, name: str, kind: type[T]) -> T | None:
    """Returns a field, or None where it is missing or null."""
    return None if message.get(name) is None else field(message, name, kind)


def save_request(message: Message) -> SaveRequest:
    """Returns what ``save.begin`` says.

    Raises:
        InvalidError: Something is missing or makes no sense.
    """
    tensors = _tensors(message)
    return SaveRequest(
        job=check_job_name(field(message, "job", str)),
        rank=field(message, "rank", int),
        step=field(message, "step", int),
        snapshot=optional(message, "snapshot", str),
        process=field(message, "process", str),
        run=field(message, "run", str),
        tensors=tensors,
        document=field(message, "document", bytes),
        consumed=optional(message, "consumed", int),
    )


def sums_of(message: Message, count: int) -> Mapping[int, int]:
    """Returns what ``save.seal`` says: the sums that the client has made of ``count`` tensors, by number.

    Raises:
        InvalidError: They are not of so many.
    """
    found, known = optional(message, "sums", bytes), optional(message, "summed", bytes)
    if found is None or known is None:
        return {}
    if (len(found), len(known)) != (8 * count, count):
        raise InvalidError(
            f"save.seal: sums: need one as uint64, and whether it is known, for {count} tensors"
        )
    where = np.flatnonzero(np.frombuffer(known, np.bool_))
    return dict(zip(where.tolist(), np.frombuffer(found, np.uint64)[where].tolist(), strict=True))


def _tensors(message: Message) -> Tensors:
    paths, kinds = field(message, "paths", list), field(message, "kinds", list)
    if len(paths) > _MAX_TENSORS:
        raise InvalidError(f"save: {len(paths)} tensors, at most {_MAX_TENSORS} a rank")
    if not set(map(type, paths)) <= {str}:
        raise InvalidError("save: paths: need texts")
    numbers = field(message, "of", bytes)
    of = np.frombuffer(numbers[: len(numbers) // 4 * 4], np.uint32)
    if len(numbers) % 4 or len(of) != len(paths) or (of >= len(kinds)).any():
        raise InvalidError(f"save: of: need the number of a kind, as uint32, for each of {len(paths)} paths")
    ties = field(message, "ties", dict)
    known = set(paths)
    for name, first in ties.items():
        if name not in known or first not in known or first in ties:
            raise InvalidError(f"save: tie of {name!r} with {first!r}: need two tensors, the second untied")
    return Tensors(paths, [_kind(each) for each in kinds], of.tolist(), ties)


def _kind(each: object) -> tuple[str, tuple[int, ...]]:
    match each:
        case [str(dtype), list(shape)] if len(shape) <= _MAX_NDIM and all(
            type(n) is int and n >= 0 for n in shape
        ):
            dtype_of(dtype)
            return dtype, tuple(shape)
    raise InvalidError(f"save: kind {each!r:.100}: need dtype and shape")
