"""The registry in an etcd cluster.

Two keys a job: ``<prefix>/heads/<job>`` holds the head, or ``null`` once the job was removed, so that a
watcher who comes late still hears of it; ``<prefix>/locks/<job>`` holds the owner's name and lives as long as
its lease. A lock's token is the revision that made its key, which an etcd that was made anew may come to
again: a lock is known by token and owner. The head moves in one transaction that compares both: the head was
not written since it was read, and the lock is the one that was taken. ``<prefix>/nodes/<node>`` holds what a
living node says of itself, and lives as long as its lease. ``<prefix>/cluster`` is the registry's name.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

import trio

from tenplexfs.core.membership import Standing
from tenplexfs.core.snapshot import Head, JobName, NodeInfo, NodeName
from tenplexfs.errors import ConflictError, CorruptError, NotFoundError, UnavailableError
from tenplexfs.formats.head_json import head_of_text, text_of_head
from tenplexfs.formats.node_json import node_of_text, text_of_node
from tenplexfs.rpc.etcd_client import Etcd, Reply
from tenplexfs.runtime.protocols import Lock, RegistryEvent

__all__ = ["EtcdRegistry"]

_NO_HEAD = "null"
_WATCH_WAIT_S = 0.2
_LOCK_TRIES = 3


@dataclass(frozen=True, slots=True)
class _Entry:
    """A key as it is; revisions 0 and an empty value when it is not there."""

    key: str = ""
    value: bytes = b""
    created: int = 0
    modified: int = 0
    lease: int = 0


class EtcdRegistry:
    """A `Registry` and a `NodeRegistry` of `tenplexfs.runtime.protocols`. For one trio thread.

    Revisions are etcd's own: they rise with every write to it, not by one with every head.

    Args:
        etcd: The cluster; closing it is the caller's.
        prefix: Of all keys; registries with different ones know nothing of each other.
    """

    def __init__(self, etcd: Etcd, *, prefix: str = "tenplexfs") -> None:
        self._etcd = etcd
        self._name = f"{prefix}/cluster"
        self._heads = f"{prefix}/heads/"
        self._locks = f"{prefix}/locks/"
        self._nodes = f"{prefix}/nodes/"
        self._leases: dict[NodeInfo, int] = {}

    async def name(self, proposed: str) -> str:
        """Returns the registry's name, ``proposed`` if it had none."""
        put = {"request_put": {"key": _encoded(self._name), "value": _encoded(proposed)}}
        said = _range(self._name)
        reply = await self._txn([_compare(self._name, "CREATE", 0)], [put, said], [said])
        return _only(reply["responses"][-1]).value.decode(errors="replace")

    async def heads(self) -> tuple[int, dict[JobName, Head]]:
        """Returns the current revision and the head of every job as of it."""
        revision, entries = await self._entries(self._heads)
        found = {self._job(entry): _head(entry) for entry in entries}
        return revision, {job: head for job, head in sorted(found.items()) if head is not None}

    async def look(self, job: JobName) -> Standing:
        """Returns what the job is, and who has its lock."""
        held, found = await self._read(job)
        return Standing(_head(found), held.value.decode(), held.created)

    async def lock(self, job: JobName, owner: str, *, ttl_s: float) -> Lock:
        """Takes the job's lock; ConflictError when another owner holds it.

        etcd counts in whole seconds, and gives two at least.
        """
        for _ in range(_LOCK_TRIES):
            held, _ = await self._read(job)
            if not held.created:
                taken = await self._take(job, owner, ttl_s)
                if taken is None:
                    continue
                return Lock(job, owner, taken.created)
            if held.value.decode() != owner:
                left_s = await self._left_s(held)
                raise ConflictError(
                    f"job {job}: locked by {held.value.decode()} for {left_s:.1f} s more",
                    job=job,
                    owner=held.value.decode(),
                )
            await self._revoke(held.lease)
        raise ConflictError(f"job {job}: the lock changes hands too quickly; try again", job=job)

    async def renew(self, lock: Lock, *, ttl_s: float) -> None:
        """Keeps ``lock``, for the time it was taken for; ConflictError when it is lost."""
        held, _ = await self._read(lock.job)
        _check_lock(lock, held)
        if not await self._renew(held.lease):
            _check_lock(lock, _Entry())

    async def unlock(self, lock: Lock) -> None:
        """Releases ``lock`` if it is still held."""
        key = self._locks + lock.job
        reply = await self._txn(
            [_compare(key, "CREATE", lock.token), _compare(key, "VALUE", lock.owner)],
            [{"request_delete_range": {"key": _encoded(key), "prev_kv": True}}],
            [],
        )
        for response in reply.get("responses", ()):
            for kv in response["response_delete_range"].get("prev_kvs", ()):
                await self._revoke(_entry(kv).lease)

    async def compare_and_set(self, lock: Lock, expected: Head | None, new: Head | None) -> None:
        """Moves the head of ``lock.job``; ConflictError when it is another, or the lock is lost.

        It is written once: after an UnavailableError only the head says whether it was done.
        """
        key = self._heads + lock.job
        found = await self._read(lock.job)
        _check(lock, expected, *found)
        value = _NO_HEAD if new is None else text_of_head(new)
        reply = await self._txn(
            [
                _compare(self._locks + lock.job, "CREATE", lock.token),
                _compare(self._locks + lock.job, "VALUE", lock.owner),
                _compare(key, "MOD", found[1].modified),
            ],
            [{"request_put": {"key": _encoded(key), "value": _encoded(value)}}],
            [_range(self._locks + lock.job), _range(key)],
            again=False,
        )
        if not reply.get("succeeded"):
            _check(lock, expected, *map(_only, reply["responses"]))
            raise ConflictError(f"job {lock.job}: the head was written meanwhile; nothing changed")

    async def watch(self, revision: int) -> AsyncGenerator[RegistryEvent, None]:
        """Yields each change after ``revision``, in order; reconnects by itself.

        Of changes that etcd has compacted only the last one of each job is told.
        """
        while True:
            try:
                async with aclosing(self._changes(revision)) as changes:
                    async for seen, event in changes:
                        revision = seen
                        if event is not None:
                            yield event
            except UnavailableError:
                await trio.sleep(_WATCH_WAIT_S)

    async def announce(self, info: NodeInfo, *, ttl_s: float) -> None:
        """Says that a node lives, for ``ttl_s`` from now; its first word fixes how many seconds that are."""
        lease = self._leases.get(info, 0)
        if not lease or not await self._renew(lease):
            lease = self._leases[info] = await self._grant(ttl_s)
        key, text = self._nodes + info.node, text_of_node(info)
        put = {"key": _encoded(key), "value": _encoded(text), "lease": str(lease)}
        is_so: list[Reply] = [
            {"key": _encoded(key), "target": "LEASE", "result": "EQUAL", "lease": str(lease)},
            {"key": _encoded(key), "target": "VALUE", "result": "EQUAL", "value": _encoded(text)},
        ]
        await self._txn(is_so, [], [{"request_put": put}])

    async def withdraw(self, info: NodeInfo) -> None:
        """Says that it lives no more; a name that another one has by now hangs on another lease."""
        if lease := self._leases.pop(info, 0):
            await self._revoke(lease)

    async def nodes(self) -> dict[NodeName, NodeInfo]:
        """Returns the living ones."""
        return (await self._living())[1]

    async def watch_nodes(self) -> AsyncGenerator[Mapping[NodeName, NodeInfo], None]:
        """Yields the living ones now and after each change; reconnects by itself."""
        told = None
        while True:
            try:
                revision, living = await self._living()
                if living != told:
                    told = living
                    yield living
                create = {**_prefix(self._nodes), "start_revision": str(revision + 1)}
                async with aclosing(self._etcd.watch({"create_request": create})) as replies:
                    async for reply in replies:
                        if reply.get("events") or reply.get("canceled"):
                            break
            except UnavailableError:
                await trio.sleep(_WATCH_WAIT_S)

    async def _living(self) -> tuple[int, dict[NodeName, NodeInfo]]:
        revision, entries = await self._entries(self._nodes)
        return revision, {info.node: info for info in map(_node, entries)}

    async def _changes(self, revision: int) -> AsyncGenerator[tuple[int, RegistryEvent | None], None]:
        """Yields how far it is and what changed, until the connection ends or etcd has forgotten the rest."""
        create = {**_prefix(self._heads), "start_revision": str(revision + 1)}
        async with aclosing(self._etcd.watch({"create_request": create})) as replies:
            async for reply in replies:
                for event in reply.get("events", ()):
                    entry = _entry(event["kv"])
                    # deleted by a hand that is not ours
                    yield self._event(entry, gone=event.get("type") == "DELETE")
                if reply.get("canceled"):
                    is_compacted = int(reply.get("compact_revision", 0)) > 0
                    break
            else:
                return
        if not is_compacted:
            raise UnavailableError("etcd: the watch was cancelled")
        now, entries = await self._entries(self._heads)
        for entry in sorted(entries, key=lambda each: each.modified):
            if entry.modified > revision:
                yield self._event(entry)
        yield now, None

    def _event(self, entry: _Entry, *, gone: bool = False) -> tuple[int, RegistryEvent]:
        head = None if gone else _head(entry)
        return entry.modified, RegistryEvent(entry.modified, self._job(entry), head)

    async def _entries(self, prefix: str) -> tuple[int, list[_Entry]]:
        reply = await self._etcd.call("kv/range", _prefix(prefix))
        return int(reply["header"]["revision"]), [_entry(kv) for kv in reply.get("kvs", ())]

    def _job(self, entry: _Entry) -> JobName:
        return JobName(entry.key.removeprefix(self._heads))

    async def _read(self, job: JobName) -> tuple[_Entry, _Entry]:
        """Returns the lock and the head of ``job``, as of one moment."""
        reply = await self._txn([], [_range(self._locks + job), _range(self._heads + job)], [])
        held, head = map(_only, reply["responses"])
        return held, head

    async def _take(self, job: JobName, owner: str, ttl_s: float) -> _Entry | None:
        """Returns the lock, made now; None when somebody was quicker."""
        lease, key = await self._grant(ttl_s), self._locks + job
        put = {"key": _encoded(key), "value": _encoded(owner), "lease": str(lease)}
        reply = await self._txn(
            [_compare(key, "CREATE", 0)], [{"request_put": put}, _range(key)], [_range(key)]
        )
        held = _only(reply["responses"][-1])
        if held.lease == lease:
            return held
        await self._revoke(lease)
        return None

    async def _grant(self, ttl_s: float) -> int:
        granted = await self._etcd.call("lease/grant", {"TTL": str(max(1, math.ceil(ttl_s)))})
        return int(granted["ID"])

    async def _renew(self, lease: int) -> bool:
        reply = await self._etcd.call("lease/keepalive", {"ID": str(lease)})
        return int(reply.get("result", {}).get("TTL", 0)) > 0

    async def _left_s(self, held: _Entry) -> float:
        reply = await self._etcd.call("lease/timetolive", {"ID": str(held.lease)})
        return max(0.0, float(reply.get("TTL", 0)))

    async def _revoke(self, lease: int) -> None:
        try:
            await self._etcd.call("lease/revoke", {"ID": str(lease)})
        except NotFoundError:  # it is over already
            return

    async def _txn(
        self, compare: list[Reply], success: list[Reply], failure: list[Reply], *, again: bool = True
    ) -> Reply:
        body = {"compare": compare, "success": success, "failure": failure}
        return await self._etcd.call("kv/txn", body, again=again)


def _check(lock: Lock, expected: Head | None, held: _Entry, found: _Entry) -> None:
    """Raises ConflictError unless the lock is held and the head is ``expected``."""
    _check_lock(lock, held)
    head = _head(found)
    if head != expected:
        raise ConflictError(
            f"job {lock.job}: head is {_named(head)}, expected {_named(expected)}; nothing changed",
            job=lock.job,
        )


def _check_lock(lock: Lock, held: _Entry) -> None:
    if (held.created, held.value.decode()) != (lock.token, lock.owner):
        holder = f"{held.value.decode()} has it" if held.created else "its time is over"
        raise ConflictError(f"job {lock.job}: the lock is lost, {holder}; nothing changed", job=lock.job)


def _named(head: Head | None) -> str:
    return "none" if head is None else str(head.snapshot)


def _head(entry: _Entry) -> Head | None:
    if not entry.modified or entry.value == _NO_HEAD.encode():
        return None
    try:
        return head_of_text(entry.value)
    except CorruptError as error:
        raise UnavailableError(f"etcd key {entry.key}: {error.message}") from error


def _node(entry: _Entry) -> NodeInfo:
    try:
        return node_of_text(entry.value)
    except CorruptError as error:
        raise UnavailableError(f"etcd key {entry.key}: {error.message}") from error


def _entry(kv: Reply) -> _Entry:
    return _Entry(
        b64decode(kv["key"]).decode(errors="replace"),
        b64decode(kv.get("value", "")),
        int(kv.get("create_revision", 0)),
        int(kv.get("mod_revision", 0)),
        int(kv.get("lease", 0)),
    )


def _only(response: Reply) -> _Entry:
    """Returns the one key that a response of a transaction tells of."""
    kvs = response["response_range"].get("kvs", ())
    return _entry(kvs[0]) if kvs else _Entry()


def _encoded(text: str) -> str:
    return b64encode(text.encode()).decode()


def _range(key: str) -> Reply:
    return {"request_range": {"key": _encoded(key)}}


def _prefix(prefix: str) -> Reply:
    # "/" is followed by "0"
    return {"key": _encoded(prefix), "range_end": _encoded(f"{prefix[:-1]}0")}


def _compare(key: str, target: str, wanted: int | str) -> Reply:
    field = {"CREATE": "create_revision", "MOD": "mod_revision", "VALUE": "value"}[target]
    value = _encoded(wanted) if isinstance(wanted, str) else str(wanted)
    return {"key": _encoded(key), "target": target, "result": "EQUAL", field: value}
