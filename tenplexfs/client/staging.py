"""Bringing tensors from a device into host memory on the way to a file, piece by piece.

Two pinned buffers take turns: while one is written into the file, the device fills the other, on a stream of
its own that begins when what the caller had queued for the tensors is done. Nothing here imports torch; who
has tensors of it has torch.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from tenplexfs.client.arrays import Source

__all__ = ["Lane", "lanes_of", "pieces"]

_PIECE_BYTES = 16 << 20


class Lane(Protocol):
    """Copies from one device; for one thread, and one tensor after the other."""

    def buffer(self, nbytes: int) -> Any:  # noqa: ANN401
        """Returns host memory that the device can fill, as a flat tensor of bytes."""
        ...

    def flat(self, tensor: Any) -> Any:  # noqa: ANN401
        """Returns the bytes of a tensor in C order, as a flat tensor on its device."""
        ...

    def begin(self, target: Any, source: Any) -> Callable[[], object]:  # noqa: ANN401
        """Begins to copy; returns what waits until it is done."""
        ...


def pieces(lane: Lane, tensor: Any, *, piece_bytes: int = _PIECE_BYTES) -> Iterator[memoryview]:  # noqa: ANN401
    """Yields the bytes of ``tensor`` in C order; each piece until the next is asked for.

    Cost: Two buffers of ``piece_bytes``, which torch keeps for the next time.
    """
    flat = lane.flat(tensor)
    nbytes = flat.shape[0]
    buffers = [lane.buffer(min(piece_bytes, nbytes)) for _ in range(min(2, -(-nbytes // piece_bytes)))]
    begun: deque[tuple[Callable[[], object], Any]] = deque()
    try:
        for number, at in enumerate(range(0, nbytes, piece_bytes)):
            source = flat[at : at + piece_bytes]
            target = buffers[number % 2][: source.shape[0]]
            begun.append((lane.begin(target, source), target))
            if len(begun) == len(buffers):
                yield _done(*begun.popleft())
        while begun:
            yield _done(*begun.popleft())
    finally:
        while begun:  # the device must not write into memory that is given back
            begun.popleft()[0]()


def _done(wait: Callable[[], object], target: Any) -> memoryview:  # noqa: ANN401
    wait()
    data: memoryview = target.numpy().data
    return data


def lanes_of(sources: Iterable[Source]) -> Callable[[Source], Lane | None]:
    """Returns what gives a lane for a tensor that is on a CUDA device, and None for others.

    Called by the thread that computes: lanes begin when what it has queued until now is done.
    """
    ready: dict[Any, Any] = {}
    for source in sources:
        device = getattr(source.value, "device", None)
        if getattr(device, "type", None) == "cuda" and device not in ready:
            cuda = sys.modules["torch"].cuda
            ready[device] = cuda.Event()
            ready[device].record(cuda.current_stream(device))

    def lane(source: Source) -> Lane | None:
        device = getattr(source.value, "device", None)
        return _CudaLane(device, ready[device]) if ready and device in ready else None

    return lane


class _CudaLane:
    """A side stream of a CUDA device."""

    def __init__(self, device: Any, ready: Any) -> None:  # noqa: ANN401
        self._torch: Any = sys.modules["torch"]
        self._stream = self._torch.cuda.Stream(device)
        self._stream.wait_event(ready)

    def buffer(self, nbytes: int) -> Any:  # noqa: ANN401
        return self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)

    def flat(self, tensor: Any) -> Any:  # noqa: ANN401
        with self._torch.cuda.stream(self._stream):
            return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(self._torch.uint8)

    def begin(self, target: Any, source: Any) -> Callable[[], object]:  # noqa: ANN401
        with self._torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._torch.cuda.Event()
            event.record(self._stream)
        wait: Callable[[], object] = event.synchronize
        return wait
