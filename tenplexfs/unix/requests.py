"""What a message of a training process says, checked field by field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.snapshot import check_job_name
from tenplexfs.errors import InvalidError
from tenplexfs.runtime.attempts import SaveRequest

__all__ = ["field", "optional", "save_request"]

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
    tensors = [_tensor(each) for each in field(message, "tensors", list)]
    if len(tensors) > _MAX_TENSORS:
        raise InvalidError(f"save: {len(tensors)} tensors, at most {_MAX_TENSORS} a rank")
    paths = {path for path, _, _ in tensors}
    ties = field(message, "ties", dict)
    for name, first in ties.items():
        if name not in paths or first not in paths or first in ties:
            raise InvalidError(f"save: tie of {name!r} with {first!r}: need two tensors, the second untied")
    return SaveRequest(
        job=check_job_name(field(message, "job", str)),
        rank=field(message, "rank", int),
        step=field(message, "step", int),
        snapshot=optional(message, "snapshot", str),
        process=field(message, "process", str),
        run=field(message, "run", str),
        tensors=tensors,
        ties=ties,
        document=field(message, "document", bytes),
        consumed=optional(message, "consumed", int),
    )


def _tensor(each: object) -> tuple[str, str, tuple[int, ...]]:
    match each:
        case [str(path), str(dtype), list(shape)] if len(shape) <= _MAX_NDIM and all(
            type(n) is int and n >= 0 for n in shape
        ):
            dtype_of(dtype)
            return path, dtype, tuple(shape)
    raise InvalidError(f"save: tensor {each!r:.100}: need path, dtype and shape")
