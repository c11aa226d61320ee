"""The text index of Tenplex datasets: files, and the ranges of the samples in each.

A line with the number of files; for each file a line ``PATH COUNT`` and COUNT lines ``BEGIN END``, end
exclusive. A path may hold spaces, which Tenplex's own reader cannot read.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from tenplexfs.errors import CorruptError, InvalidError

__all__ = ["parse_tenplex_index"]

_NUMBERS = re.compile(rb"[0-9 \n]*")


def parse_tenplex_index(data: bytes) -> list[tuple[str, npt.NDArray[np.int64]]]:
    """Returns each file's path, as it is written, and its ranges, int64 (n, 2), in the order of the index.

    Raises:
        InvalidError: A line is not what it should be; the message gives its number.
        CorruptError: The text ends before it is complete.

    Cost: about 100 ns a range; no Python object for each.
    """
    text = data.replace(b"\r\n", b"\n")
    if not text.endswith(b"\n"):
        text += b"\n"
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))

    def line(number: int) -> bytes:
        if number >= ends.size:
            raise CorruptError(f"Tenplex index: ends after line {ends.size}, more are announced")
        return text[int(ends[number - 1]) + 1 if number else 0 : int(ends[number])]

    found: list[tuple[str, npt.NDArray[np.int64]]] = []
    number = 1
    for _ in range(_count(line(0), 1)):
        path, _, count_text = line(number).rpartition(b" ")
        count = _count(count_text, number + 1)
        if not path:
            raise InvalidError(f"Tenplex index: line {number + 1}: need PATH COUNT, got {line(number)!r}")
        if count:
            line(number + count)
        begin, end = int(ends[number]) + 1, int(ends[number + count]) + 1
        found.append((path.decode("utf-8", "surrogateescape"), _ranges(text[begin:end], count, number + 2)))
        number += count + 1
    if text[int(ends[number - 1]) + 1 :].strip():
        raise InvalidError(
            f"Tenplex index: line {number + 1}: nothing more is announced, got {line(number)!r}"
        )
    return found


def _count(text: bytes, line: int) -> int:
    if not text.isdigit():
        raise InvalidError(f"Tenplex index: line {line}: need a count, got {text!r}")
    return int(text)


def _ranges(text: bytes, count: int, first_line: int) -> npt.NDArray[np.int64]:
    """Parses ``count`` lines of two numbers."""
    codes = np.frombuffer(text, np.uint8)
    gaps = np.flatnonzero((codes == ord(" ")) | (codes == ord("\n")))
    widths = np.diff(gaps, prepend=-1) - 1
    expected = np.tile(np.frombuffer(b" \n", np.uint8), count)
    regular = gaps.size == 2 * count and np.array_equal(codes[gaps], expected)
    if (
        not regular
        or _NUMBERS.fullmatch(text) is None
        or (count and not 1 <= widths.min() <= widths.max() <= 18)
    ):
        for number, row in enumerate(text.split(b"\n")[:-1]):
            if not re.fullmatch(rb"[0-9]{1,18} [0-9]{1,18}", row):
                raise InvalidError(
                    f"Tenplex index: line {first_line + number}: need BEGIN END, got {row[:80]!r}"
                )
    if not count:
        return np.empty((0, 2), np.int64)
    return np.fromstring(text.decode("ascii"), np.int64, sep=" ").reshape(count, 2)
