"""What the mount shows at this moment, without the mount: which snapshot each job's name leads to.

Owned by the trio thread. Every method that a file system call reaches is a plain function: an ``await`` in
one of them would let a switch happen between a lookup and its answer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import trio

from tenplexfs.core.snapshot import JobName
from tenplexfs.errors import NotFoundError, PreconditionError, StaleError
from tenplexfs.runtime.protocols import FileContent, SnapshotView
from tenplexfs.runtime.tree import SLOT_SHIFT, Attributes, BytesContent, SnapshotTree, Tree

if TYPE_CHECKING:
    from tenplexfs.core.ptc import PTC

__all__ = ["INVALIDATE_TIMEOUT_S", "ROOT_INO", "Control", "Handles", "Namespace", "StoreNumbers"]

log = logging.getLogger(__name__)

ROOT_INO = 1
INVALIDATE_TIMEOUT_S = 5.0

_TOP, _JOBS = 2, 3  # .tenplexfs and .tenplexfs/jobs
_FIRST_FILE = 4
_JOB_FLAG = 1 << 37
_JOB_SHIFT = 4
_JOB_MASK = (1 << _JOB_SHIFT) - 1


class StoreNumbers(NamedTuple):
    """Size of the store, for ``df``."""

    limit_bytes: int
    used_bytes: int


class Handles(NamedTuple):
    """What holds a snapshot: open files (mapped ones too) and open directories, in number."""

    files: int
    directories: int


@dataclass(frozen=True, slots=True)
class Control:
    """Contents of ``.tenplexfs``, made anew at each open; the functions are called on the trio thread.

    Attributes:
        files: Name of a file in ``.tenplexfs`` to what makes its bytes.
        jobs: The jobs that ``.tenplexfs/jobs`` lists.
        job_files: Name of a file in ``.tenplexfs/jobs/<job>`` to what makes its bytes.
    """

    files: Mapping[str, Callable[[], bytes]]
    jobs: Callable[[], Collection[JobName]]
    job_files: Mapping[str, Callable[[JobName], bytes]]


class _LiveTree:
    """Slot 0: the root and ``.tenplexfs``, which change; the kernel caches nothing of them but the root."""

    def __init__(
        self,
        control: Control,
        roots: Mapping[JobName, SnapshotTree],
        unlisted: Mapping[JobName, SnapshotTree],
        clock_ns: Callable[[], int],
    ) -> None:
        self.root_mtime_ns = clock_ns()
        self._control = control
        self._roots = roots
        self._unlisted = unlisted
        self._clock_ns = clock_ns
        self._files = [(name.encode(), make) for name, make in sorted(control.files.items())]
        self._job_files = [(name.encode(), make) for name, make in sorted(control.job_files.items())]
        # A job keeps its number, so that a position in a listing stays right while jobs come and go.
        self._numbers: dict[JobName, int] = {}
        self._jobs: list[JobName] = []

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        """Returns the entry ``name`` of the directory ``parent``, or None."""
        if parent == ROOT_INO:
            # Hot: every walk into a job comes through here.
            job = JobName(name.decode(errors="replace"))
            root = self._roots.get(job) or self._unlisted.get(job)
            if root is not None:
                return root.attributes(root.root)
        return next((entry for entry_name, entry, _ in self.entries(parent, 0) if entry_name == name), None)

    def attributes(self, ino: int) -> Attributes:
        """Returns the attributes of ``ino``; files have size 0, as in ``/proc``."""
        if ino == ROOT_INO:
            return Attributes(ino, True, 0, 3 + len(self._roots), self.root_mtime_ns)
        is_dir = ino in (_TOP, _JOBS) or bool(ino & _JOB_FLAG and not ino & _JOB_MASK)
        nlink = {_TOP: 3, _JOBS: 2 + len(self._control.jobs())}.get(ino, 2) if is_dir else 1
        return Attributes(ino, is_dir, 0, nlink, self._clock_ns())

    def entries(self, ino: int, start: int) -> Iterator[tuple[bytes, Attributes, int]]:
        """Yields the entries of a directory after the position ``start``: name, attributes, own position."""
        if ino == ROOT_INO:
            if start == 0:
                yield b".tenplexfs", self.attributes(_TOP), 1
            for number, job in self._numbered(self._roots):
                if number + 2 > start:
                    tree = self._roots[job]
                    yield job.encode(), tree.attributes(tree.root), number + 2
        elif ino == _TOP:
            names = [b"jobs", *(name for name, _ in self._files)]
            for at in range(start, len(names)):
                yield names[at], self.attributes(_JOBS + at), at + 1
        elif ino == _JOBS:
            for number, job in self._numbered(self._control.jobs()):
                if number + 1 > start:
                    yield job.encode(), self.attributes(_JOB_FLAG | number << _JOB_SHIFT), number + 1
        else:
            for at in range(start, len(self._job_files)):
                yield self._job_files[at][0], self.attributes(ino + 1 + at), at + 1

    def xattrs(self, ino: int) -> Mapping[bytes, bytes]:
        """Returns nothing."""
        return {}

    def open(self, ino: int) -> FileContent:
        """Makes the bytes of the file ``ino``.

        Raises:
            NotFoundError: Its job is gone.
        """
        if not ino & _JOB_FLAG:
            return BytesContent(self._files[ino - _FIRST_FILE][1]())
        job = self._jobs[(ino & ~_JOB_FLAG) >> _JOB_SHIFT]
        if job not in self._control.jobs():
            raise NotFoundError(f"job {job}: not here any more")
        return BytesContent(self._job_files[(ino & _JOB_MASK) - 1][1](job))

    def _numbered(self, jobs: Collection[JobName]) -> list[tuple[int, JobName]]:
        for job in sorted(set(jobs) - self._numbers.keys()):
            self._numbers[job] = len(self._jobs)
            self._jobs.append(job)
        return sorted((self._numbers[job], job) for job in jobs)


class Namespace:
    """The content of the mount: a live part, and a tree for each snapshot that is published or not yet freed.

    Args:
        control: Contents of ``.tenplexfs``.
        store: Asked for the numbers of ``df``.
        clock_ns: Wall clock.

    Attributes:
        device: ``major:minor`` of the mount, while mounted.
        notify: While mounted, makes the kernel forget a name of the root; it blocks, and is called in a
            worker thread. The mount sets it.
    """

    def __init__(
        self, control: Control, store: Callable[[], StoreNumbers], *, clock_ns: Callable[[], int]
    ) -> None:
        self.notify: Callable[[bytes], None] | None = None
        self.device: str | None = None
        self.store = store
        self._clock_ns = clock_ns
        self._roots: dict[JobName, SnapshotTree] = {}
        self._unlisted: dict[JobName, SnapshotTree] = {}
        self._live = _LiveTree(control, self._roots, self._unlisted, clock_ns)
        self._trees: dict[int, Tree] = {0: self._live}
        self._slots = count(1)
        self._fhs = count(1)
        self._files: dict[int, tuple[int, FileContent]] = {}  # fh -> inode, content
        self._open_files: Counter[int] = Counter()  # by slot
        self._open_directories: Counter[int] = Counter()
        self._orphans: dict[int, Attributes] = {}  # of files still open in freed snapshots
        # Own threads: a switch must not queue behind peers' calls.
        self._limiter = trio.CapacityLimiter(4)

    # What the daemon does.

    def publish(self, job: JobName, view: SnapshotView, ptc: PTC | None) -> int:
        """Lets ``job`` lead to this snapshot, and returns its slot.

        The one before stays reachable until `free`. For use before the mount is there, or without one.
        ``ptc`` is None while the job has no state.
        """
        return self._install(job, SnapshotTree(next(self._slots), view, ptc))

    async def publish_and_invalidate(self, job: JobName, view: SnapshotView, ptc: PTC | None) -> int:
        """Publishes, and returns the slot once every fresh open sees the snapshot. One at a time for a job.

        Cost: The tree is built in a worker thread; the switch itself is one assignment and one notification.
        """
        slot = next(self._slots)
        like = self._roots.get(job)
        tree = await trio.to_thread.run_sync(SnapshotTree, slot, view, ptc, like, limiter=self._limiter)
        self._install(job, tree)
        await self._invalidate(job)
        return slot

    async def add_name(self, name: JobName, slot: int) -> int:
        """Lets ``name`` lead to the snapshot of ``slot`` too, by inodes of its own, and returns their slot.

        It can be walked to but is not listed until `list_name`.
        """
        tree = self._trees[slot]
        assert isinstance(tree, SnapshotTree)
        twin = tree.twin(next(self._slots))
        self._trees[twin.slot] = twin
        had = self._roots.pop(name, None) or self._unlisted.get(name)
        self._unlisted[name] = twin
        if had is not None:
            await self._invalidate(name)
        return twin.slot

    async def list_name(self, name: JobName) -> None:
        """Lists a name that `add_name` made."""
        if name in self._unlisted:
            self._roots[name] = self._unlisted.pop(name)
            self._live.root_mtime_ns = self._clock_ns()
            await self._invalidate(name)

    def retract(self, job: JobName) -> None:
        """Takes a name out of the root; its snapshot stays reachable for who is in it, until `free`."""
        self._roots.pop(job, None)
        self._unlisted.pop(job, None)
        self._live.root_mtime_ns = self._clock_ns()

    async def retract_and_invalidate(self, job: JobName) -> None:
        """Retracts, and returns once no fresh walk finds the name."""
        self.retract(job)
        await self._invalidate(job)

    def slot(self, job: JobName) -> int | None:
        """Returns the slot that a name leads to now."""
        tree = self._roots.get(job) or self._unlisted.get(job)
        return None if tree is None else tree.slot

    def open_handles(self, slot: int) -> Handles:
        """Returns what is open of a snapshot."""
        return Handles(self._open_files[slot], self._open_directories[slot])

    def free(self, slot: int) -> None:
        """Forgets a snapshot: directories in it answer ESTALE from now on, open files keep their bytes.

        Raises:
            PreconditionError: A job leads to it.
        """
        for job, root in (*self._roots.items(), *self._unlisted.items()):
            if root.slot == slot:
                raise PreconditionError(f"job {job}: slot {slot} is what it shows; publish another first")
        tree = self._trees.pop(slot, None)
        if tree is None:
            return
        for ino, _ in self._files.values():
            if ino >> SLOT_SHIFT == slot:
                self._orphans[ino] = tree.attributes(ino)

    async def replace_contents(
        self, slots: Collection[int], make: Callable[[FileContent], Awaitable[FileContent | None]]
    ) -> bool:
        """Lets the open files of some slots go on with the same bytes from elsewhere, as ``make`` gives them.

        Returns False once it gives None.
        """
        for fh, (ino, content) in list(self._files.items()):
            if ino >> SLOT_SHIFT not in slots or fh not in self._files:
                continue
            new = await make(content)
            if new is None:
                return False
            if fh in self._files:
                self._files[fh] = (ino, new)
                content.close()
            else:  # it was closed meanwhile
                new.close()
        return True

    # What file system calls do.

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        """Returns the entry ``name`` of the directory ``parent``, or None.

        Raises:
            StaleError: The directory's snapshot was freed.
        """
        return self._tree(parent).lookup(parent, name)

    def getattr(self, ino: int) -> Attributes:
        """Returns the attributes of ``ino``.

        Raises:
            StaleError: Its snapshot was freed, and it is no open file.
        """
        orphan = self._orphans.get(ino) if self._orphans else None
        return orphan if orphan is not None else self._tree(ino).attributes(ino)

    def xattrs(self, ino: int) -> Mapping[bytes, bytes]:
        """Returns the extended attributes of ``ino`` by name.

        Raises:
            StaleError: Its snapshot was freed.
        """
        return self._tree(ino).xattrs(ino)

    def readdir(self, ino: int, start: int) -> Iterator[tuple[bytes, Attributes, int]]:
        """Returns the entries of a directory after the position ``start``: name, attributes, own position.

        Raises:
            StaleError: Its snapshot was freed.
        """
        return self._tree(ino).entries(ino, start)

    def open(self, ino: int) -> int:
        """Opens the file ``ino`` and returns its handle, which `release` gives back.

        Raises:
            StaleError: Its snapshot was freed.
        """
        content = self._tree(ino).open(ino)
        fh = next(self._fhs)
        self._files[fh] = (ino, content)
        self._open_files[ino >> SLOT_SHIFT] += 1
        return fh

    def content(self, fh: int) -> FileContent:
        """Returns the content of an open file."""
        return self._files[fh][1]

    def release(self, fh: int) -> None:
        """Closes an open file."""
        ino, content = self._files.pop(fh)
        _decrement(self._open_files, ino >> SLOT_SHIFT)
        if ino in self._orphans and all(ino != other for other, _ in self._files.values()):
            del self._orphans[ino]
        content.close()

    def opendir(self, ino: int) -> None:
        """Counts an open directory, until `releasedir`.

        Raises:
            StaleError: Its snapshot was freed.
        """
        self._tree(ino)
        self._open_directories[ino >> SLOT_SHIFT] += 1

    def releasedir(self, ino: int) -> None:
        """Counts an open directory less."""
        _decrement(self._open_directories, ino >> SLOT_SHIFT)

    def release_all(self) -> None:
        """Closes what is open; for when the kernel will not do it any more."""
        for fh in list(self._files):
            self.release(fh)
        self._open_directories.clear()

    def _tree(self, ino: int) -> Tree:
        tree = self._trees.get(ino >> SLOT_SHIFT)
        if tree is None:
            raise StaleError("the snapshot was freed; walk from the job's name again")
        return tree

    def _install(self, job: JobName, tree: SnapshotTree) -> int:
        self._trees[tree.slot] = tree
        self._roots[job] = tree
        self._live.root_mtime_ns = self._clock_ns()
        return tree.slot

    async def _invalidate(self, job: JobName) -> None:
        notify = self.notify
        if notify is None:
            return
        # Shielded: what is published must be told, also when the caller gives up; it takes milliseconds.
        with trio.move_on_after(INVALIDATE_TIMEOUT_S, shield=True) as scope:
            await trio.to_thread.run_sync(notify, job.encode(), abandon_on_cancel=True, limiter=self._limiter)
        if scope.cancelled_caught:
            log.warning("job %s: the kernel did not take the switch in %s s", job, INVALIDATE_TIMEOUT_S)


def _decrement(counter: Counter[int], key: int) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
