"""The embedded registry: heads, locks, their history, and the living nodes, in one SQLite file of one daemon.

A head is written in the transaction that checks it and the lock, and is on disk before the call returns. Of a
node only what it says of itself is written; until when it lives is known here alone, and begins anew with the
daemon, so that nobody is taken for dead because this one was.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tenplexfs.core.membership import Standing
from tenplexfs.core.snapshot import Head, JobName, NodeInfo, NodeName
from tenplexfs.errors import ConflictError, CorruptError, ExistsError, UnavailableError
from tenplexfs.formats.head_json import head_of_text, text_of_head
from tenplexfs.formats.node_json import node_of_text, text_of_node

__all__ = ["SqliteRegistry"]

_KEPT_COUNT = 10_000
_SCHEMA = """
CREATE TABLE IF NOT EXISTS heads (job TEXT PRIMARY KEY, revision INTEGER NOT NULL, head TEXT);
CREATE TABLE IF NOT EXISTS events (revision INTEGER PRIMARY KEY, job TEXT NOT NULL, head TEXT);
CREATE TABLE IF NOT EXISTS locks (
    job TEXT PRIMARY KEY, owner TEXT NOT NULL, token INTEGER NOT NULL, ttl_s REAL NOT NULL,
    expires REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS nodes (info TEXT PRIMARY KEY, ttl_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS names (what TEXT PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT OR IGNORE INTO counters VALUES ('revision', 0);
"""


class SqliteRegistry:
    """Heads and locks in the file ``path``, made when it is not there. Thread-safe; calls block on the disk.

    Args:
        path: Belongs to this object alone until `close`.
        clock: Seconds that never go back; locks expire by it.
        kept_count: Changes that `events` can tell one by one; of older ones, only what became of each job.

    Raises:
        ExistsError: Another process has the file.
        CorruptError: It is no registry.
    """

    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.monotonic, kept_count: int = _KEPT_COUNT
    ) -> None:
        self._path = path
        self._clock = clock
        self._kept_count = kept_count
        self._mutex = threading.Lock()
        self._living_lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=0.5)
        try:
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            # Tokens begin at the time in ms: no lock of a registry that was lost has one of this one's.
            first = f"INSERT OR IGNORE INTO counters VALUES ('token', {time.time_ns() // 1_000_000});"
            self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} {first} COMMIT;")
            # The clock may have begun anew with the machine: no lock may outlast its time from now.
            self._db.execute("UPDATE locks SET expires = min(expires, ? + ttl_s)", (clock(),))
            rows = self._db.execute("SELECT info, ttl_s FROM nodes").fetchall()
            self._living = {node_of_text(info): clock() + ttl_s for info, ttl_s in rows}
        except sqlite3.OperationalError as error:
            self._db.close()
            raise ExistsError(
                f"registry {path}: in use by another daemon, or not ours to write: {error}"
            ) from error
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise CorruptError(f"registry {path}: {error}; rebuild it from the nodes' manifests") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._mutex:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                except BaseException:
                    self._db.execute("ROLLBACK")
                    raise
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                raise UnavailableError(f"registry {self._path}: {error}") from error

    def close(self) -> None:
        """Gives the file back."""
        with self._mutex:
            self._db.close()

    def name(self, proposed: str) -> str:
        """Returns the registry's name, ``proposed`` if it had none."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO names VALUES ('cluster', ?)", (proposed,))
            (name,) = db.execute("SELECT name FROM names WHERE what = 'cluster'").fetchone()
        return str(name)

    def heads(self) -> tuple[int, dict[JobName, Head]]:
        """Returns the current revision and the head of every job as of it."""
        with self._transaction() as db:
            rows = db.execute("SELECT job, head FROM heads WHERE head IS NOT NULL ORDER BY job").fetchall()
            return _counter(db, "revision"), {JobName(job): head_of_text(head) for job, head in rows}

    def look(self, job: JobName) -> Standing:
        """Returns what the job is, and who has its lock."""
        with self._transaction() as db:
            row = db.execute("SELECT head FROM heads WHERE job = ?", (job,)).fetchone()
            lock = db.execute(
                "SELECT owner, token FROM locks WHERE job = ? AND expires > ?", (job, self._clock())
            ).fetchone()
        head = None if row is None or row[0] is None else head_of_text(row[0])
        return Standing(head, *(lock or ()))

    def lock(self, job: JobName, owner: str, *, ttl_s: float) -> int:
        """Returns the token of the lock that ``owner`` now has, another one each time.

        Raises:
            ConflictError: Another owner holds it.
        """
        now = self._clock()
        with self._transaction() as db:
            row = db.execute("SELECT owner, token, expires FROM locks WHERE job = ?", (job,)).fetchone()
            if row is not None and row[2] > now and row[0] != owner:
                raise ConflictError(
                    f"job {job}: locked by {row[0]} for {row[2] - now:.1f} s more", job=job, owner=row[0]
                )
            token = _counter(db, "token", step=1)
            values = (job, owner, token, ttl_s, now + ttl_s)
            db.execute("INSERT OR REPLACE INTO locks VALUES (?, ?, ?, ?, ?)", values)
            return int(token)

    def renew(self, job: JobName, token: int, *, ttl_s: float) -> None:
        """Keeps the lock that has ``token``.

        Raises:
            ConflictError: It is lost.
        """
        with self._transaction() as db:
            _check_lock(db, job, token, self._clock())
            values = (ttl_s, self._clock() + ttl_s, job)
            db.execute("UPDATE locks SET ttl_s = ?, expires = ? WHERE job = ?", values)

    def unlock(self, job: JobName, token: int) -> None:
        """Releases the lock if ``token`` still holds it."""
        with self._transaction() as db:
            db.execute("DELETE FROM locks WHERE job = ? AND token = ?", (job, token))

    def compare_and_set(self, job: JobName, token: int, expected: Head | None, new: Head | None) -> int:
        """Moves the head of ``job`` from ``expected`` to ``new`` (None: no such job); returns the revision.

        Raises:
            ConflictError: The head is another, or the lock is lost. Nothing changed.
        """
        with self._transaction() as db:
            _check_lock(db, job, token, self._clock())
            row = db.execute("SELECT head FROM heads WHERE job = ?", (job,)).fetchone()
            found = head_of_text(row[0]) if row is not None and row[0] is not None else None
            if found != expected:
                raise ConflictError(
                    f"job {job}: head is {_named(found)}, expected {_named(expected)}; nothing changed",
                    job=job,
                )
            revision = _counter(db, "revision", step=1)
            head = None if new is None else text_of_head(new)
            db.execute("INSERT OR REPLACE INTO heads VALUES (?, ?, ?)", (job, revision, head))
            db.execute("INSERT INTO events VALUES (?, ?, ?)", (revision, job, head))
            db.execute("DELETE FROM events WHERE revision <= ?", (revision - self._kept_count,))
            return revision

    def events(self, revision: int) -> list[tuple[int, JobName, Head | None]]:
        """Returns each change after ``revision``, in order.

        When some of them are no longer known one by one, returns the last change of each job instead.
        """
        with self._transaction() as db:
            (oldest,) = db.execute("SELECT min(revision) FROM events").fetchone()
            table = "events" if oldest is not None and revision >= oldest - 1 else "heads"
            rows = db.execute(
                f"SELECT revision, job, head FROM {table} WHERE revision > ? ORDER BY revision", (revision,)
            ).fetchall()
        return [
            (number, JobName(job), None if head is None else head_of_text(head)) for number, job, head in rows
        ]

    def announce(self, info: NodeInfo, *, ttl_s: float) -> bool:
        """Lets a node live for ``ttl_s`` from now; returns whether that was not known."""
        with self._living_lock:
            for other in [each for each, expires in self._living.items() if expires <= self._clock()]:
                self._forget(other)
            if is_new := info not in self._living:
                for other in [each for each in self._living if each.node == info.node]:
                    self._forget(other)
                with self._transaction() as db:
                    db.execute("INSERT INTO nodes VALUES (?, ?)", (text_of_node(info), ttl_s))
            self._living[info] = self._clock() + ttl_s
        return is_new

    def withdraw(self, info: NodeInfo) -> None:
        """Ends the life of a node, unless another one has its name by now."""
        with self._living_lock:
            if info in self._living:
                self._forget(info)

    def nodes(self) -> dict[NodeName, NodeInfo]:
        """Returns the living nodes, by name."""
        now = self._clock()
        with self._living_lock:
            living = [info for info, expires in self._living.items() if expires > now]
        return {info.node: info for info in sorted(living, key=lambda each: each.node)}

    def _forget(self, info: NodeInfo) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM nodes WHERE info = ?", (text_of_node(info),))
        del self._living[info]


def _check_lock(db: sqlite3.Connection, job: JobName, token: int, now: float) -> None:
    lock = db.execute("SELECT owner, token, expires FROM locks WHERE job = ?", (job,)).fetchone()
    if lock is None or lock[1] != token or lock[2] <= now:
        holder = f"{lock[0]} has it" if lock is not None and lock[1] != token else "its time is over"
        raise ConflictError(f"job {job}: the lock is lost, {holder}; nothing changed", job=job)


def _counter(db: sqlite3.Connection, name: str, *, step: int = 0) -> int:
    if step:
        db.execute("UPDATE counters SET value = value + ? WHERE name = ?", (step, name))
    (value,) = db.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
    return int(value)


def _named(head: Head | None) -> str:
    return "none" if head is None else str(head.snapshot)
