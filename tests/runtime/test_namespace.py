import threading

import pytest
import trio

from tenplexfs.core.snapshot import JobName
from tenplexfs.errors import NotFoundError, PreconditionError, StaleError
from tenplexfs.runtime import namespace as module
from tenplexfs.runtime.namespace import ROOT_INO, Control, Handles, Namespace, StoreNumbers
from tests.fuse.memory import MemoryView, small_ptc

JOB = JobName("gpt")


class Clock:
    now_ns = 1000

    def __call__(self) -> int:
        return self.now_ns


def make(jobs: list[JobName] | None = None, clock: Clock | None = None) -> Namespace:
    jobs = [] if jobs is None else jobs
    control = Control(
        files={"version": lambda: b"1\n", "metrics": lambda: b"m"},
        jobs=lambda: jobs,
        job_files={"stop": lambda job: b"-\n", "status.json": lambda job: b"of " + job.encode()},
    )
    return Namespace(control, lambda: StoreNumbers(100, 10), clock_ns=clock or Clock())


def view(version: int, job: str = JOB) -> MemoryView:
    return MemoryView(job, version, small_ptc())


def ino_of(namespace: Namespace, path: str) -> int:
    ino = ROOT_INO
    for name in path.split("/"):
        entry = namespace.lookup(ino, name.encode())
        if entry is None:
            raise FileNotFoundError(path)
        ino = entry.ino
    return ino


def names(namespace: Namespace, path: str = "") -> list[str]:
    ino = ino_of(namespace, path) if path else ROOT_INO
    return [name.decode() for name, _, _ in namespace.readdir(ino, 0)]


def read(namespace: Namespace, path: str) -> bytes:
    fh = namespace.open(ino_of(namespace, path))
    data = namespace.content(fh).read(0, 1 << 20)
    namespace.release(fh)
    assert data is not None
    return bytes(data)


def test_publish_switches_and_the_old_stays_until_freed():
    namespace = make()
    first = namespace.publish(JOB, view(1), small_ptc())
    old_dir = ino_of(namespace, "gpt/model/0")
    second = namespace.publish(JOB, view(2), small_ptc())
    assert namespace.slot(JOB) == second != first
    assert b'"version": 2' in read(namespace, "gpt/job.json")
    assert namespace.lookup(old_dir, b"scale.npy") is not None
    namespace.free(first)
    for stale in (
        lambda: namespace.lookup(old_dir, b"scale.npy"),
        lambda: namespace.getattr(old_dir),
        lambda: namespace.readdir(old_dir, 0),
        lambda: namespace.opendir(old_dir),
        lambda: namespace.open(old_dir),
        lambda: namespace.xattrs(old_dir),
    ):
        with pytest.raises(StaleError):
            stale()
    namespace.free(first)  # once more is nothing


def test_what_a_job_shows_is_not_freed():
    namespace = make()
    slot = namespace.publish(JOB, view(1), small_ptc())
    with pytest.raises(PreconditionError, match="job gpt: slot 1 is what it shows"):
        namespace.free(slot)
    namespace.retract(JOB)
    namespace.free(slot)
    assert names(namespace) == [".tenplexfs"]


def test_open_files_keep_bytes_and_attributes():
    namespace = make()
    slot = namespace.publish(JOB, view(1), small_ptc())
    ino = ino_of(namespace, "gpt/full/scale.npy")
    before = namespace.getattr(ino)
    handles = [namespace.open(ino), namespace.open(ino)]
    namespace.opendir(ino_of(namespace, "gpt"))
    assert namespace.open_handles(slot) == Handles(files=2, directories=1)
    namespace.publish(JOB, view(2), small_ptc())
    namespace.free(slot)
    for fh in handles:
        assert namespace.getattr(ino) == before
        data = namespace.content(fh).read(0, before.size)
        assert data is not None
        assert len(data) == before.size
        namespace.release(fh)
    with pytest.raises(StaleError):
        namespace.getattr(ino)
    namespace.releasedir(slot << 40)
    assert namespace.open_handles(slot) == Handles(0, 0)


def test_all_handles_are_given_back_when_the_mount_is_gone():
    namespace = make()
    slot = namespace.publish(JOB, view(1), small_ptc())
    namespace.open(ino_of(namespace, "gpt/full/scale.npy"))
    namespace.opendir(ino_of(namespace, "gpt"))
    namespace.release_all()
    assert namespace.open_handles(slot) == Handles(0, 0)


def test_control_files_are_made_at_open():
    jobs = [JobName("b"), JobName("a")]
    namespace = make(jobs)
    assert names(namespace, ".tenplexfs") == ["jobs", "metrics", "version"]
    assert names(namespace, ".tenplexfs/jobs") == ["a", "b"]
    assert names(namespace, ".tenplexfs/jobs/a") == ["status.json", "stop"]
    assert read(namespace, ".tenplexfs/version") == b"1\n"
    assert read(namespace, ".tenplexfs/jobs/b/status.json") == b"of b"
    assert read(namespace, ".tenplexfs/jobs/b/stop") == b"-\n"
    assert namespace.getattr(ino_of(namespace, ".tenplexfs/metrics")).size == 0
    assert namespace.getattr(ino_of(namespace, ".tenplexfs/jobs")).nlink == 4
    ino = ino_of(namespace, ".tenplexfs/jobs/b/stop")
    del jobs[0]
    with pytest.raises(NotFoundError, match="job b"):
        namespace.open(ino)
    with pytest.raises(FileNotFoundError):
        ino_of(namespace, ".tenplexfs/jobs/b")


def test_positions_in_the_root_survive_jobs_that_come_and_go():
    namespace = make()
    for job in ("a", "b", "c"):
        namespace.publish(JobName(job), view(1, job), small_ptc())
    assert names(namespace) == [".tenplexfs", "a", "b", "c"]
    position = next(position for name, _, position in namespace.readdir(ROOT_INO, 0) if name == b"b")
    namespace.retract(JobName("a"))
    namespace.publish(JobName("0"), view(1, "0"), small_ptc())
    assert [name for name, _, _ in namespace.readdir(ROOT_INO, position)] == [b"c", b"0"]


def test_the_root_tells_when_it_changed():
    clock = Clock()
    namespace = make(clock=clock)
    assert namespace.getattr(ROOT_INO) == (ROOT_INO, True, 0, 3, 1000)
    clock.now_ns = 2000
    namespace.publish(JOB, view(1), small_ptc())
    assert namespace.getattr(ROOT_INO)[3:] == (4, 2000)
    clock.now_ns = 3000
    namespace.retract(JOB)
    assert namespace.getattr(ROOT_INO)[3:] == (3, 3000)


def test_the_kernel_is_told_after_the_switch_in_another_thread():
    namespace = make()
    seen: list[tuple[bytes, int | None, bool]] = []
    main = threading.current_thread()
    namespace.notify = lambda name: seen.append(
        (name, namespace.slot(JOB), threading.current_thread() is main)
    )

    async def scenario() -> None:
        assert await namespace.publish_and_invalidate(JOB, view(1), small_ptc()) == 1
        assert await namespace.publish_and_invalidate(JOB, view(2), None) == 2
        await namespace.retract_and_invalidate(JOB)

    trio.run(scenario)
    assert seen == [(b"gpt", 1, False), (b"gpt", 2, False), (b"gpt", None, False)]


def test_a_kernel_that_does_not_answer_is_not_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(module, "INVALIDATE_TIMEOUT_S", 0.01)
    namespace = make()
    release = threading.Event()
    namespace.notify = lambda name: release.wait() and None

    async def scenario() -> None:
        with trio.fail_after(5):
            await namespace.publish_and_invalidate(JOB, view(1), small_ptc())

    trio.run(scenario)
    release.set()
    assert "job gpt: the kernel did not take the switch" in caplog.text
