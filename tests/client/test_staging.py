"""Tensors on their way from a device: what is written is what the device had, whenever its copies end."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import xxhash

from tenplexfs.client.arrays import Source
from tenplexfs.client.copying import Copier, Placed
from tenplexfs.client.staging import lanes_of, pieces

MIB = 1 << 20


class LateLane:
    """A device in host memory whose copies end only when they are waited for, and not before."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self.open = 0

    def buffer(self, nbytes: int) -> torch.Tensor:
        self.buffers.append(torch.full((nbytes,), 0xEE, dtype=torch.uint8))
        return self.buffers[-1]

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(-1).view(torch.uint8)

    def begin(self, target: torch.Tensor, source: torch.Tensor):
        target.fill_(0xDD)  # whoever still reads the buffer sees it
        self.open += 1

        def wait() -> None:
            target.copy_(source)
            self.open -= 1

        return wait


TENSOR = torch.arange(1000, dtype=torch.int32).reshape(40, 25).T


@pytest.mark.parametrize("piece_bytes", [1, 7, 1999, 2000, 2001, 3999, 4000, 9999])
def test_pieces_are_the_bytes_in_order(piece_bytes):
    lane = LateLane()
    found = b"".join(bytes(piece) for piece in pieces(lane, TENSOR, piece_bytes=piece_bytes))
    assert found == TENSOR.numpy().tobytes()
    assert len(lane.buffers) == (1 if piece_bytes >= 4000 else 2) and not lane.open


def test_nothing_is_copied_of_nothing():
    lane = LateLane()
    assert list(pieces(lane, torch.empty(0, 3))) == [] and not lane.buffers


def test_copies_that_were_begun_are_waited_for_when_writing_fails():
    lane = LateLane()
    found = pieces(lane, TENSOR, piece_bytes=100)
    next(found)
    assert lane.open == 1
    found.close()
    assert not lane.open


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_a_tensor_with_a_lane_is_written_through_it(tmp_path, dtype):
    tensor = torch.randint(0, 2, (1100, 2048)).to(dtype)
    source = Source(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor)
    file = tmp_path / "file"
    file.write_bytes(b"\xaa" * 64)
    fd = os.open(file, os.O_RDWR)
    copier = Copier(lambda _: LateLane())
    tasks = list(copier.tasks(fd, [Placed(64, b"h" * 128, source, 3)]))
    for _, task in tasks:
        task()
    os.close(fd)
    wanted = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    assert len(tasks) == 1 and len(wanted) >= MIB
    assert file.read_bytes() == b"\xaa" * 64 + b"h" * 128 + wanted
    assert copier.sums == {3: xxhash.xxh3_64_intdigest(wanted)}


def test_what_is_in_host_memory_needs_no_lane():
    sources = [Source((3,), "float32", torch.ones(3)), Source((3,), "float32", np.ones(3, np.float32))]
    lanes = lanes_of(sources)
    assert [lanes(source) for source in sources] == [None, None]
