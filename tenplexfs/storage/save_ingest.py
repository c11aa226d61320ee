"""The way into a store for training processes, which write into its files themselves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from tenplexfs.errors import InvalidError
from tenplexfs.storage.directory import OBJECTS
from tenplexfs.storage.holders import has_writer
from tenplexfs.storage.ingest import Ingest, Key

if TYPE_CHECKING:
    from tenplexfs.core.ptc import Shard

__all__ = ["HandedOut", "SaveIngest"]


class HandedOut(NamedTuple):
    """A file that a client writes an array into.

    Attributes:
        fd: Of the caller, who closes it.
        offset: Where the array begins.
        recycled: It has its pages already.
    """

    fd: int
    offset: int
    recycled: bool


class SaveIngest(Ingest):
    """An ingest whose big arrays are files that are handed out.

    `settle` and `sums` may be called by several threads, each for keys of its own.
    """

    def in_file(self, key: Key) -> bool:
        """Returns whether the array has a file of its own, else it comes as bytes."""
        return self._writable(key).file.startswith(OBJECTS)

    def hand_out(self, key: Key) -> HandedOut:
        """Opens the file of an array for whoever fills it."""
        ref = self._writable(key)
        fd = os.open(self._directory.path / ref.file, os.O_RDWR | os.O_CLOEXEC)
        return HandedOut(fd, ref.offset + ref.header_bytes, self._files.is_recycled(ref.file))

    def settle(self, keys: Sequence[Key]) -> list[Key]:
        """Makes the files of ``keys`` unwritable; returns those that somebody can still write into."""
        late = []
        for key in keys:
            path = self._directory.path / self._writable(key).file
            path.chmod(0o400)
            if has_writer(path):
                late.append(key)
        return late

    def copy_out(self, key: Key) -> None:
        """Puts an array into a file that nobody else has ever had.

        Raises:
            NoRoomError: There is no room for it twice.
        """
        ref = self._writable(key)
        (name,) = self._files.allocate([(OBJECTS, ref.header_bytes + ref.nbytes)])
        root = self._directory.path
        with (root / ref.file).open("rb") as source, (root / name).open("r+b") as target:
            while os.sendfile(target.fileno(), source.fileno(), None, 1 << 30):
                pass
        with self._lock:
            self._held.add(name)
            self._fresh.append(name)
            old = self._slots[key]
            new = replace(old, ref=replace(ref, file=name))
            self._slots.update({other: new for other, slot in self._slots.items() if slot is old})
        self._forget(ref.file)

    def finish(self, key: Key, shard: Shard) -> tuple[int, ...]:
        """Zeroes the padding of an array that is written, and returns the sums of its pieces."""
        ref = self._writable(key)
        if shard.padding:
            path = self._directory.path / ref.file
            path.chmod(0o600)
            array = self.array(key)
            for box in shard.padding:
                within = array if box.ndim == array.ndim else array.reshape(-1)
                within[box.as_slices()] = 0
            if ref.file.startswith(OBJECTS):
                del array, within
                self._maps.pop(ref.file, None)
            path.chmod(0o400 if ref.file.startswith(OBJECTS) else 0o600)
        return self._sums(ref, self._boxes_of(shard))

    def join(self, groups: Iterable[Sequence[Key]]) -> None:
        """Keeps the array of the first key of each group for the others too, whose own are given back.

        Raises:
            InvalidError: They differ in shape or type.
        """
        with self._lock:
            keys_of: dict[int, list[Key]] = {}
            for key, slot in self._slots.items():
                keys_of.setdefault(id(slot), []).append(key)
            for first, *others in groups:
                slot = self._slots[first]
                for key in others:
                    old = self._slots[key]
                    if (old.ref.shape, old.ref.dtype) != (slot.ref.shape, slot.ref.dtype):
                        raise InvalidError(
                            f"rank {key[0]}, {key[1]}: {old.ref.shape}, rank {first[0]} has {slot.ref.shape}"
                        )
                    if old is not slot:
                        self._slots.update(dict.fromkeys(keys_of[id(old)], slot))
        used = {slot.ref.file for slot in self._slots.values()}
        for name in self._held - used:
            self._forget(name)

    def set_values(self, values: bytes, settings_json: bytes) -> None:
        """Says what the ranks hold beside tensors, and the settings, where a save may say how far data is."""
        self._snapshot = replace(self._snapshot, values=values, settings_json=settings_json)

    def drop(self) -> None:
        """Gives back everything, unless it is sealed; what no client has is kept for the next save."""
        if self._open:
            self._open = False
            self._maps.clear()
            self._files.let_go(self._held, recycle=True)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._held.discard(name)
            self._fresh.remove(name)
            self._maps.pop(name, None)
        self._files.let_go([name], recycle=True)
