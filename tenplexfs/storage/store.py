"""The store of a node: snapshots in a directory in memory, found again after the daemon died."""

from __future__ import annotations

import os
import resource
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypedDict

from tenplexfs.core.region import Region
from tenplexfs.core.snapshot import COPIES, JobName, SnapshotId
from tenplexfs.errors import (
    CorruptError,
    ExistsError,
    InvalidError,
    NoRoomError,
    NotFoundError,
    PreconditionError,
    StaleError,
)
from tenplexfs.formats import manifest
from tenplexfs.formats.manifest import ArrayRef, Manifest, StoredSnapshot
from tenplexfs.storage.arrays import Mismatch, SnapshotArrays, mismatches
from tenplexfs.storage.directory import Directory
from tenplexfs.storage.files import FileTable, Pressure
from tenplexfs.storage.ingest import Ingest, Key, Wanted
from tenplexfs.storage.save_ingest import RankFiles, SaveIngest

__all__ = [
    "ArrayRef",
    "Ingest",
    "Key",
    "Mismatch",
    "RankFiles",
    "SaveIngest",
    "SnapshotArrays",
    "Store",
    "StoredSnapshot",
    "Wanted",
]


class _Parts(TypedDict):
    directory: Directory
    files: FileTable
    publish: Callable[[StoredSnapshot, frozenset[str]], None]
    check_room: Callable[[int, Iterable[str]], None]


@dataclass(slots=True)
class _Entry:
    """A snapshot that the manifest names, or that somebody still reads; it holds its files as long."""

    stored: StoredSnapshot
    blob: bytes
    files: frozenset[str]
    pins: int = 0
    named: bool = True


class Store:
    """What a node holds. Thread-safe; `open` it, and `close` it for the next owner.

    Every change of the manifest is one rename: whenever the process dies, the store opens again with each
    snapshot sealed or not there, committed or staged.

    Attributes:
        path: Its directory.
        node: The node whose it is.
        incarnation: Another one whenever the store begins anew, empty.
        limit_bytes: What its files may take.
    """

    def __init__(
        self, directory: Directory, files: FileTable, *, node: str, incarnation: str, limit_bytes: int
    ) -> None:
        self.path = directory.path
        self.node = node
        self.incarnation = incarnation
        self.limit_bytes = limit_bytes
        self._directory = directory
        self._files = files
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._lock = threading.Lock()
        found = directory.path.stat().st_dev
        self._device = f"{os.major(found)}:{os.minor(found)}"

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        node: str,
        limit_bytes: int,
        new_id: Callable[[], str] = lambda: secrets.token_hex(8),
        clock: Callable[[], float] = time.monotonic,
    ) -> Store:
        """Opens the store at ``path``, or begins one; what a crash left half done is deleted.

        The process's soft limit of descriptors is raised to the hard one: a mapped file takes one.

        Raises:
            ExistsError: Another process has it; the message gives its pid.
            PreconditionError: It is another node's or user's, or cannot be made.
            InvalidError: The directory is something else.
            CorruptError: The manifest or a file it names is damaged or missing.
        """
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        directory = Directory(path)
        try:
            data = directory.read_manifest()
            with _naming(directory.path):
                found = Manifest(node, new_id(), ()) if data is None else manifest.decode(data)
            files = FileTable(directory.path, limit_bytes=limit_bytes, new_id=new_id, clock=clock)
            store = cls(directory, files, node=node, incarnation=found.incarnation, limit_bytes=limit_bytes)
            store._load(found)
            if data is None:
                store._write(store._entries.values())
        except BaseException:
            directory.close()
            raise
        return store

    @property
    def used_bytes(self) -> int:
        """Bytes of its files in whole pages, with those that are dropped and still mapped here."""
        return self._files.used_bytes

    def snapshots(self, job: str | None = None) -> tuple[StoredSnapshot, ...]:
        """Returns what the manifest names, of ``job`` or of all, in the order of sealing."""
        with self._lock:
            entries = list(self._entries.values())
        return tuple(entry.stored for entry in entries if job in (None, entry.stored.job))

    def ingest(
        self,
        job: JobName,
        snapshot: SnapshotId,
        layout_json: bytes,
        created_ns: int,
        *,
        settings_json: bytes = b"",
        values: bytes = b"",
        fence: int = 0,
        limit_bytes: int | None = None,
    ) -> Ingest:
        """Returns an empty snapshot to be filled and sealed.

        Args:
            job: Whose it is.
            snapshot: Which.
            layout_json: The layout as it was given.
            created_ns: When it is made, since 1970.
            settings_json: The settings of the job.
            values: What is no tensor, packed.
            fence: Of the lock under which it is staged.
            limit_bytes: What all snapshots of the job may take together, this one too.

        Raises:
            ExistsError: The store has a snapshot of that job and txid.
        """
        with self._lock:
            self._check_new(job, snapshot)
        stored = StoredSnapshot(
            job, snapshot, False, layout_json, created_ns, {}, settings_json, values, fence
        )
        return Ingest(stored, **self._parts(job, limit_bytes))

    def save_ingest(
        self,
        job: JobName,
        snapshot: SnapshotId,
        layout_json: bytes,
        created_ns: int,
        *,
        settings_json: bytes,
        limit_bytes: int | None = None,
    ) -> SaveIngest:
        """Returns the same for what training processes write.

        Sealing it replaces a staged one of that txid, which may be what the job's head names until then.
        """
        stored = StoredSnapshot(job, snapshot, False, layout_json, created_ns, {}, settings_json)
        parts = self._parts(job, limit_bytes)
        parts["publish"] = partial(self._publish, again=True)
        return SaveIngest(stored, **parts)

    def _parts(self, job: JobName, limit_bytes: int | None) -> _Parts:
        def check_room(needed_bytes: int, held: Iterable[str]) -> None:
            if limit_bytes is not None:
                self._check_job_room(job, limit_bytes, needed_bytes, held)

        return {
            "directory": self._directory,
            "files": self._files,
            "publish": self._publish,
            "check_room": check_room,
        }

    def _check_job_room(self, job: JobName, limit_bytes: int, needed_bytes: int, held: Iterable[str]) -> None:
        held = frozenset(held)
        while True:
            with self._lock:
                names = held.union(*self._files_of(job))
            used = self._files.bytes_of(names)
            if used + needed_bytes <= limit_bytes:
                return
            pressure = self._files.pressure
            if needed_bytes > limit_bytes or pressure is None or not pressure.relieve():
                raise NoRoomError(
                    f"job {job}: {needed_bytes} bytes needed on node {self.node}, {used} used, "
                    f"its memory is {limit_bytes}: drop kept steps or raise it",
                    needed_bytes=needed_bytes,
                    used_bytes=used,
                    limit_bytes=limit_bytes,
                )

    def room_bytes(self, job: JobName, limit_bytes: int | None) -> int:
        """Returns what ``job``, whose snapshots and copies may take ``limit_bytes``, can take as it is."""
        room = self.limit_bytes - self.used_bytes
        if limit_bytes is not None:
            with self._lock:
                names = frozenset[str]().union(*self._files_of(job))
            room = min(room, limit_bytes - self._files.bytes_of(names))
        return room

    def _files_of(self, job: str) -> list[frozenset[str]]:
        """Returns the files of each snapshot of a job, and of each set of copies that is kept for it."""
        wanted = job.partition(COPIES)[0]
        return [e.files for e in self._entries.values() if e.stored.job.partition(COPIES)[0] == wanted]

    def relieve_by(self, pressure: Pressure) -> None:
        """Has ``pressure`` asked when there is no room."""
        self._files.pressure = pressure

    def is_held_elsewhere(self, device: str, inode: int) -> bool:
        """Returns whether that is a file of a dropped snapshot which another process still has."""
        return device == self._device and inode in self._files.lingering()

    @property
    def spare_bytes(self) -> int:
        """Bytes that are allocated and no snapshot's: they go as soon as there is no room without."""
        return self._files.spare_bytes

    def free_spares(self, idle_s: float = 0.0) -> None:
        """Gives back the files that are kept to be used again, and for which nothing came for so long."""
        self._files.free_spares(idle_s)

    def commit(self, job: str, txid: str) -> None:
        """Makes a staged snapshot a committed one; nothing where it is that already.

        Raises:
            NotFoundError: The store has no such snapshot.
        """
        with self._lock:
            entry = self._entry(job, txid)
            if entry.stored.committed:
                return
            before = entry.stored
            entry.stored = replace(before, committed=True)
            try:
                self._write(self._entries.values())
            except BaseException:
                entry.stored = before
                raise

    def drop(self, job: str, txid: str) -> None:
        """Takes a snapshot out of the manifest; nothing where there is none.

        Its files are unlinked as far as no other snapshot names them, once nobody pins it; those that nobody
        has open or mapped are kept to be used again.
        """
        with self._lock:
            entry = self._entries.get((job, txid))
            if entry is None:
                return
            self._write(other for other in self._entries.values() if other is not entry)
            del self._entries[(job, txid)]
            entry.named = False
        self._free(entry)

    def arrays(self, stored: StoredSnapshot) -> SnapshotArrays:
        """Returns the arrays of a snapshot, pinned until they are released.

        Raises:
            StaleError: It was dropped.
        """
        with self._lock:
            entry = self._entries.get((stored.job, stored.id.txid))
            if entry is None:
                raise StaleError(f"job {stored.job}, {stored.id}: was dropped from the store of {self.node}")
            entry.pins += 1

            def release() -> None:
                with self._lock:
                    entry.pins -= 1
                self._free(entry)

            return SnapshotArrays(entry.stored, files=self._files, release=release)

    def verify(self, job: str | None = None) -> Iterator[Mismatch]:
        """Makes all sums again and yields what differs; arrays that snapshots share are read once."""
        seen: set[tuple[str, int, tuple[Region, ...]]] = set()
        for stored in self.snapshots(job):
            try:
                arrays = self.arrays(stored)
            except StaleError:
                continue
            with arrays:
                keys: dict[int, list[Key]] = {}
                for key, ref in stored.arrays.items():
                    keys.setdefault(id(ref), []).append(key)
                for same in keys.values():
                    ref = stored.arrays[same[0]]
                    if (what := (ref.file, ref.offset, ref.boxes)) not in seen:
                        seen.add(what)
                        yield from mismatches(arrays, tuple(same), ref)

    def close(self) -> None:
        """Gives the directory up; maps stay valid. Snapshots that are staged stay staged."""
        self._files.free_spares()
        self._directory.close()

    def _load(self, found: Manifest) -> None:
        if found.node != self.node:
            raise PreconditionError(
                f"store {self.path}: is that of node {found.node!r}, this is {self.node!r}"
            )
        sizes: dict[str, int] = {}
        for committed, blob in found.snapshots:
            with _naming(self.path):
                stored = manifest.decode_snapshot(blob, committed=committed)
            for ref in stored.arrays.values():
                sizes[ref.file] = max(sizes.get(ref.file, 0), ref.offset + ref.header_bytes + ref.nbytes)
            files = frozenset(ref.file for ref in stored.arrays.values())
            self._entries[(stored.job, stored.id.txid)] = _Entry(stored, blob, files)
        self._files.adopt(sizes)
        for entry in self._entries.values():
            self._files.hold(entry.files)

    def _publish(self, stored: StoredSnapshot, files: frozenset[str], *, again: bool = False) -> None:
        entry = _Entry(stored, manifest.encode_snapshot(stored), files)
        key = stored.job, stored.id.txid
        with self._lock:
            before = self._entries.get(key)
            if before is not None and (before.stored.committed or not again):
                self._check_new(stored.job, stored.id)
            self._write([*(other for other in self._entries.values() if other is not before), entry])
            self._entries.pop(key, None)
            self._entries[key] = entry
            if before is not None:
                before.named = False
        if before is not None:
            self._free(before)

    def _write(self, entries: Iterable[_Entry]) -> None:
        snapshots = tuple((entry.stored.committed, entry.blob) for entry in entries)
        data = manifest.encode(Manifest(self.node, self.incarnation, snapshots))
        try:
            self._directory.write_manifest(data)
        except NoRoomError:
            if not self._files.free_spares():
                raise
            self._directory.write_manifest(data)

    def _free(self, entry: _Entry) -> None:
        with self._lock:
            if entry.named or entry.pins:
                return
            files, entry.files = entry.files, frozenset()
        self._files.let_go(files, recycle=True)

    def _entry(self, job: str, txid: str) -> _Entry:
        entry = self._entries.get((job, txid))
        if entry is None:
            raise NotFoundError(f"store of {self.node}: has no snapshot {txid} of job {job}")
        return entry

    def _check_new(self, job: str, snapshot: SnapshotId) -> None:
        if (job, snapshot.txid) in self._entries:
            raise ExistsError(f"store of {self.node}: has job {job}, {snapshot} already")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Lets errors of the manifest say which store it is."""
    try:
        yield
    except (CorruptError, InvalidError) as error:
        raise type(error)(f"store {path}: {error.message}") from error
