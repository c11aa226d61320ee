"""What was uploaded of one rank, of a step that is not known yet: tensors in files of the store, and values.

Belongs to the trio thread. A tensor is there once all of it has come; before that it has no header, and what
has none is no part of any save.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import trio
import xxhash

from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.snapshot import JobName
from tenplexfs.errors import ConflictError, ExistsError, InvalidError, NotFoundError, TooLargeError
from tenplexfs.formats.rng import is_random_state
from tenplexfs.formats.structure import Flat
from tenplexfs.formats.tenplex_files import (
    LIST_FILE,
    TENSOR,
    TensorFile,
    array_value,
    list_length,
    state_of,
    tensor_path,
    value_of,
)
from tenplexfs.runtime.attempts import Base
from tenplexfs.runtime.save_parts import RankPlan, Tensors, plan_rank
from tenplexfs.storage.arrangement import Slot
from tenplexfs.storage.store import RankFiles, SaveIngest

__all__ = ["MAX_VALUE_BYTES", "Received", "TensorWriter", "Upload", "plan_of_layout"]

MAX_VALUE_BYTES = 16 << 20
"""Of one file that is no tensor of the layout."""

_MAX_VALUES_BYTES = 48 << 20  # of a rank; they travel in one message to whoever loads them
_MAX_FILES = 1 << 20


@dataclass(frozen=True, slots=True)
class Received:
    """A file that was uploaded, whole.

    Attributes:
        keys: Its path of keys: its name without what says its type.
        value: What it stands for: a `TensorFile`, a value, or the length of a list.
        data: As it came, where it is no tensor of the layout.
        array: dtype and shape, where it is an array that the layout does not know.
    """

    keys: str
    value: object
    data: bytes = b""
    array: tuple[str, tuple[int, ...]] | None = None

    def as_array(self) -> npt.NDArray[np.generic]:
        """Returns the array that it is, where it is one."""
        assert self.array is not None
        dtype, shape = self.array
        return np.frombuffer(self.data, dtype_of(dtype)).reshape(shape)


@dataclass(eq=False)
class TensorWriter:
    """Where the bytes of a tensor go.

    Attributes:
        slot: Its place.
        done_bytes: What has come of it.
        sum: Of that.
    """

    slot: Slot
    fd: int
    upload: Upload
    done_bytes: int = 0
    sum: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)

    def write(self, data: bytes | memoryview) -> None:
        """Takes the next bytes.

        Raises:
            InvalidError: They are more than the tensor has.
            ConflictError: The rank was given up meanwhile.
        """
        self.upload.check()
        left = self.slot.nbytes - self.done_bytes
        if len(data) > left:
            raise InvalidError(f"{self.slot.keys[0][1]}: more than its {self.slot.nbytes} bytes came")
        self.sum.update(data)
        view = memoryview(data)
        while view:
            at = self.slot.offset + len(self.slot.header) + self.done_bytes
            count = os.pwrite(self.fd, view, at)
            self.done_bytes += count
            view = view[count:]


@dataclass(eq=False)
class Upload:
    """What one rank has brought.

    Attributes:
        base: What the job was when it began.
        files: What has come, by name.
        failure: Why nothing of it is good any more; then only the names are left.
        was_listed: Somebody has asked for the names.
        begun_s: When its first file began to come.
        touched_s: When its last one had come, or was deleted.
        users_count: Requests that bring something of it now.
    """

    job: JobName
    rank: int
    base: Base
    plan: RankPlan
    ingest: SaveIngest
    room: RankFiles
    begun_s: float
    touched_s: float
    files: dict[str, Received] = field(default_factory=dict)
    failure: ConflictError | None = None
    was_listed: bool = False
    users_count: int = 0
    _busy: set[str] = field(default_factory=set)
    _values_bytes: int = 0
    _taken: dict[str, str] = field(default_factory=dict)  # tensor path -> the file that is it
    _sums: dict[str, int] = field(default_factory=dict)
    _lock: trio.Lock = field(default_factory=trio.Lock)
    _built: Flat[TensorFile] | None = None

    def __post_init__(self) -> None:
        self._slots = {path: slot for slot in self.room.arrangement.slots for _, path in slot.keys}

    def check(self) -> None:
        """Raises why nothing of it is good any more."""
        if self.failure is not None:
            raise ConflictError(self.failure.message)

    @property
    def is_whole(self) -> bool:
        """Whether it is still as it was when `lacks` found nothing."""
        return self.failure is None and not self.users_count and self._built is not None

    # What comes in.

    def shape_of(self, name: str) -> tuple[str, str, tuple[int, ...]] | None:
        """Returns path, dtype and local shape of the tensor that a file is in the layout, or None."""
        stem = name.removesuffix(TENSOR)
        found = next((path for path in tensor_path(stem) if path in self._slots), None)
        return None if found is None else (found, self._slots[found].dtype, self._slots[found].shape)

    def put(self, name: str, data: bytes, *, replace: bool) -> None:
        """Takes a file that is no tensor.

        Raises:
            InvalidError: It does not hold what its name says.
            ExistsError: It is there, and ``replace`` is not given.
            TooLargeError: The rank has too many, or too much of them.
            ConflictError: The rank was given up.
        """
        self.check_new(name, replace=replace)
        if name.rpartition("/")[2] == LIST_FILE:
            received = Received(name.removesuffix(LIST_FILE).removesuffix("/"), list_length(data), data)
        else:
            received = Received(*value_of(name, data), data)
        self._take(name, received)

    def check_array(self, name: str, *, replace: bool) -> None:
        """Refuses an array that the layout does not know, and that is no state of a random-number generator.

        Raises:
            InvalidError: It is something else.
            ExistsError, ConflictError, TooLargeError: As for `put`.
        """
        self.check_new(name, replace=replace)
        if not is_random_state(tensor_path(name.removesuffix(TENSOR))[0]):
            raise InvalidError(f"job {self.job}, rank {self.rank}: {name}: the layout has none on this rank")

    def put_array(self, name: str, dtype: str, shape: tuple[int, ...], data: bytes, *, replace: bool) -> None:
        """Takes an array that `check_array` lets through."""
        self.check_array(name, replace=replace)
        value = array_value(dtype, shape, data)
        self._take(name, Received(name.removesuffix(TENSOR), value, data, (dtype, shape)))

    def put_back(self, name: str, before: Received | None) -> None:
        """Undoes what took a file; a tensor that was there before is gone."""
        self.remove(name)
        if before is not None and self.failure is None and not isinstance(before.value, TensorFile):
            self._take(name, before)

    def _take(self, name: str, received: Received) -> None:
        before = self.files.get(name)
        more = len(received.data) - (0 if before is None else len(before.data))
        if self._values_bytes + more > _MAX_VALUES_BYTES:
            raise TooLargeError(
                f"{name}: the values of rank {self.rank} would take {self._values_bytes + more} bytes, "
                f"at most {_MAX_VALUES_BYTES}: what is large belongs into the layout, as a tensor"
            )
        self._values_bytes += more
        self.files[name] = received
        self._built = None

    def check_new(self, name: str, *, replace: bool) -> None:
        """Refuses a file that could not be taken, before it comes.

        Raises:
            ExistsError, ConflictError, TooLargeError: As for `put`.
        """
        self.check()
        if name in self._busy:
            raise ConflictError(f"{name}: is being uploaded by somebody else")
        if name in self.files and not replace:
            raise ExistsError(f"{name}: is there already; x-replace: true replaces it")
        if len(self.files) >= _MAX_FILES:
            raise TooLargeError(f"{name}: rank {self.rank} has {len(self.files)} files, at most {_MAX_FILES}")

    @asynccontextmanager
    async def tensor(self, name: str, *, replace: bool) -> AsyncIterator[TensorWriter]:
        """Gives what takes the bytes of a tensor; it is there once the block has ended well.

        Raises:
            InvalidError: The layout has none of this name, or not all bytes came.
            ExistsError, ConflictError, TooLargeError: As for `put`.
        """
        found = self.shape_of(name)
        if found is None:
            raise InvalidError(f"job {self.job}, rank {self.rank}: {name}: the layout has none on this rank")
        name = f"{name.removesuffix(TENSOR)}{TENSOR}"
        self.check_new(name, replace=replace)
        path, slot = found[0], self._slots[found[0]]
        if self._taken.get(path, name) != name:
            raise ConflictError(f"{name}: tensor {path} is there as {self._taken[path]}")
        self.remove(name)
        self._busy.add(name)
        self._taken[path] = name
        try:
            async with self._lock:  # the first one to get a file blanks all headers in it
                (fd,) = await trio.to_thread.run_sync(self.ingest.hand_out, self.room, [slot.file])
            try:
                os.pwrite(fd, b"\0", slot.offset)  # of what is replaced
                writer = TensorWriter(slot, fd, self)
                yield writer
                self.check()
                if writer.done_bytes != slot.nbytes:
                    raise InvalidError(f"{name}: {writer.done_bytes} bytes of {slot.nbytes} came")
                os.pwrite(fd, slot.header, slot.offset)
            finally:
                os.close(fd)
            self.files[name] = Received(name.removesuffix(TENSOR), TensorFile(path))
            self._sums[path] = writer.sum.intdigest()
        finally:
            self._busy.discard(name)
            if name not in self.files:
                self._taken.pop(path, None)
            if self.failure is not None and not self._busy:
                await self._let_go()

    def remove(self, name: str) -> None:
        """Forgets a file, if it is there."""
        received = self.files.pop(name, None)
        if received is None:
            return
        self._values_bytes -= len(received.data)
        self._built = None
        if isinstance(received.value, TensorFile):
            self._taken.pop(received.value.path, None)

    # What was brought.

    def array(self, name: str) -> npt.NDArray[np.generic]:
        """Returns the array of the file ``name``, which has one.

        Raises:
            NotFoundError: It is not there.
            ConflictError: The rank was given up.
        """
        self.check()
        received = self.files.get(name)
        if received is None:
            raise NotFoundError(f"{name}: no such file")
        if received.array is not None:
            return received.as_array()
        assert isinstance(received.value, TensorFile)
        slot = self._slots[received.value.path]
        (fd,) = self.ingest.hand_out(self.room, [slot.file])
        try:
            mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        return np.ndarray(slot.shape, dtype_of(slot.dtype), mapped, slot.offset + len(slot.header))

    async def lacks(self) -> str | None:
        """Returns what is missing, or None when the rank is complete."""
        if self.failure is not None:
            return self.failure.message
        if self.users_count:
            return "a file is still coming"
        there = {each.value.path for each in self.files.values() if isinstance(each.value, TensorFile)}
        missing = sorted(self._slots.keys() - there)
        if missing:
            return f"{len(missing)} tensors are missing: {', '.join(missing[:5])}"
        try:
            await self.flat()
        except InvalidError as error:
            return error.message
        return None

    async def flat(self) -> Flat[TensorFile]:
        """Returns the state that the files are.

        Raises:
            InvalidError: They are none, as a list without some of its items.
        """
        if self._built is None:
            lists = {
                each.keys: each.value
                for name, each in self.files.items()
                if name.rpartition("/")[2] == LIST_FILE and isinstance(each.value, int)
            }
            values = {name: each for name, each in self.files.items() if name.rpartition("/")[2] != LIST_FILE}
            self._built = await trio.to_thread.run_sync(_flat, values, lists)
        return self._built

    def sums(self) -> dict[int, int]:
        """Returns the sum of each tensor as it came, by its number."""
        return {number: self._sums[path] for number, path in enumerate(self.plan.tensors.paths)}

    def hand_over(self, ingest: SaveIngest, plan: RankPlan) -> RankFiles:
        """Gives the tensors to a save. Implements `runtime.saving.Reserve`.

        Raises:
            ConflictError: The layout is another one by now.
        """
        if plan.arrangement != self.room.arrangement:
            raise ConflictError(f"job {self.job}, rank {self.rank}: the layout changed since it was uploaded")
        ingest.adopt(self.ingest, self.room)
        return self.room

    async def give_up(self, why: str) -> None:
        """Frees what was brought; the names stay."""
        if self.failure is None:
            self.failure = ConflictError(f"job {self.job}, rank {self.rank}: {why}")
            self.files = {name: Received(each.keys, None) for name, each in self.files.items()}
            if not self._busy:
                await self._let_go()

    async def _let_go(self) -> None:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self.ingest.drop)


def _flat(values: Mapping[str, Received], lists: Mapping[str, int]) -> Flat[TensorFile]:
    by_keys: dict[str, object] = {}
    for name, each in values.items():
        if each.keys in by_keys:
            raise InvalidError(f"{name}: {each.keys} is there with another type, too")
        by_keys[each.keys] = each.value
    return state_of(by_keys, lists)


def plan_of_layout(base: Base, job: JobName, rank: int) -> RankPlan:
    """Returns where the tensors go that the layout of a job has on a rank.

    Cost: About 20 us a tensor.
    """
    ptc = base.ptc
    paths = ptc.rank_paths(rank)
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    of = [
        kinds.setdefault((ptc.tensors[path].dtype, ptc.shard(rank, path).local_shape), len(kinds))
        for path in paths
    ]
    return plan_rank(ptc, job, rank, Tensors(list(paths), list(kinds), of, {}))
