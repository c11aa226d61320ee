"""Random-number states among the values of a job: the one that a new rank gets, derived from an old one.

What is one is said by its path: a component that has the word ``rng`` (``rng``, ``rng_state``,
``torch_rng_state``). What is known of its form is drawn anew from a hash of the old state and the number of
the new rank, so that the same change gives the same states again, and no two ranks the same numbers:

- Python's `random.getstate()`, numpy's `numpy.random.get_state()` with its words as a list, and torch's state
  of a CPU generator are Mersenne twisters: their 624 words, to be drawn from at the next call,
- torch's state of a CUDA generator, 16 bytes: its seed, at offset 0,
- numpy's PCG64: its 128 bits.

Source: CPython ``Modules/_randommodule.c``; PyTorch ``aten/src/ATen/CPUGeneratorImpl.cpp``
(`CPUGeneratorImplState`) and ``CUDAGeneratorImpl.cpp``; numpy ``random/_mt19937.pyx``, ``_pcg64.pyx``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct

from tenplexfs.formats.leaves import Leaf

__all__ = ["derive", "is_random_state"]

_WORDS = 624
_TORCH_CPU_BYTES = 5056
_TORCH_CUDA_BYTES = 16
_TORCH_HEAD = struct.Struct("<QiiQ")  # seed, left, seeded, next
_LOCAL_TENSOR = "tenplexfs.torch.state:LocalTensor:"
_WORD = re.compile(r"(?<![a-z0-9])rng(?![a-z0-9])")


def is_random_state(path: str) -> bool:
    """Returns whether the value at ``path`` is a random-number state.

    >>> [is_random_state(path) for path in ("rng/torch", "np_rng_state", "string", "lr")]
    [True, True, False, False]
    """
    return _WORD.search(path.lower()) is not None


def derive(path: str, leaf: Leaf, rank: int) -> Leaf | None:
    """Returns the state of a new rank, or None where the form of ``leaf`` is not known.

    Args:
        path: Of the value.
        leaf: The state of the old rank that the new one takes after.
        rank: The new one.
    """
    drawn = hashlib.shake_256(f"tenplexfs rng\0{rank}\0{json.dumps(leaf)}".encode())
    if type(leaf) is int:
        return int.from_bytes(drawn.digest(16)) if path.endswith("state/state") else None
    match leaf:
        case [3, [*words], _] if len(words) == _WORDS + 1:  # of who knows lists only
            return [3, [*_words(drawn.digest(4 * _WORDS)), _WORDS], None]
        case ["MT19937", *_]:
            made = derive(path, {"$": "tuple", "items": leaf}, rank)
            return None if made is None else made["items"]
        case {"$": "bytes", "base64": str(text)}:
            data = _derive_bytes(base64.b64decode(text), drawn.digest(4 * _WORDS))
            return None if data is None else {**leaf, "base64": base64.b64encode(data).decode()}
        case {"$": "namedtuple", "class": str(kind), "items": ["uint8", shape, data]}:
            made = derive(path, data, rank) if kind.startswith(_LOCAL_TENSOR) else None
            return None if made is None else {**leaf, "items": ["uint8", shape, made]}
        case {"$": "tuple", "items": [3, {"$": "tuple", "items": words}, _]} if len(words) == _WORDS + 1:
            new = {"$": "tuple", "items": [*_words(drawn.digest(4 * _WORDS)), _WORDS]}
            return {**leaf, "items": [3, new, None]}
        case {
            "$": "tuple",
            "items": ["MT19937", {"$": "namedtuple", "items": ["uint32", _, _]} as words, *_],
        }:
            raw = {"$": "bytes", "base64": base64.b64encode(drawn.digest(4 * _WORDS)).decode()}
            new = {**words, "items": [*words["items"][:2], raw]}
            return {**leaf, "items": ["MT19937", new, _WORDS, 0, 0.0]}
        case {"$": "tuple", "items": ["MT19937", [*words], *_]} if len(words) == _WORDS:
            return {**leaf, "items": ["MT19937", _words(drawn.digest(4 * _WORDS)), _WORDS, 0, 0.0]}
    return None


def _words(drawn: bytes) -> list[int]:
    return list(struct.unpack(f"<{_WORDS}I", drawn))


def _derive_bytes(data: bytes, drawn: bytes) -> bytes | None:
    if len(data) == _TORCH_CUDA_BYTES:
        return drawn[:8] + bytes(8)
    if len(data) != _TORCH_CPU_BYTES:
        return None
    head = _TORCH_HEAD.pack(int.from_bytes(drawn[:8], "little"), 1, 1, 0)
    words = struct.pack(f"<{_WORDS}Q", *_words(drawn))
    return (head + words).ljust(_TORCH_CPU_BYTES, b"\0")
