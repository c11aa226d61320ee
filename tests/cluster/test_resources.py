"""Schedulers that say what devices there are, over gRPC, to real daemons."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

import tenplexfs
from tenplexfs._pb import control_pb2
from tenplexfs.errors import InvalidError, TenplexError
from tenplexfs.rpc.connection import Connection
from tests.cluster.daemons import Daemon, Daemons, check, until
from tests.cluster.ranks import all_do, ranks
from tests.cluster.test_daemons import WHOLE, prepare

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mount,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse is not there"),
]

TABLE = {"kind": "table", "rows": {"2": {"mp_size": 1, "pp_size": 2, "dp_size": 1}, "4": {"tp": 2, "pp": 2}}}


class Hook:
    """A scheduler's own server: fails the first request, then takes what comes."""

    def __init__(self) -> None:
        self.events: Queue[dict[str, Any]] = Queue()
        self.refused = 0
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if not hook.refused:
                    hook.refused += 1
                    self.send_error(503)
                    return
                hook.events.put(json.loads(body))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/job"

    def __enter__(self) -> Hook:
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Iterator[Daemons]:
    with Daemons(tmp_path_factory.mktemp("resources"), 2, memory="256MiB") as daemons:
        prepare(daemons.base)
        yield daemons


@contextmanager
def job(two: Daemons, name: str = "gpt", **settings: object) -> Iterator[Connection]:
    """A job with state on both nodes, and the scheduler's connection, to the second one."""
    first = two.nodes[0]
    given = [part for item in settings.items() for part in ("--set", f"{item[0]}={json.dumps(item[1])}")]
    first.ok("job", "create", name, "--layout", str(two.base / "layout.json"), *given)
    first.ok("import", name, str(two.base / "model.safetensors"), "--step", "7")
    connection = Connection(f"127.0.0.1:{two.ports['node1']}")
    try:
        yield connection
    finally:
        connection.close()
        first.ok("job", "remove", name)


def notify(
    connection: Connection, nodes: Mapping[str, int], request_id: str = "", name: str = "gpt"
) -> list[control_pb2.Progress]:
    request = control_pb2.NotifyResourcesRequest(job=name, nodes=nodes, request_id=request_id)
    return list(connection.stream("Control/NotifyResources", request, deadline_s=60))


def mesh_of(progress: control_pb2.Progress) -> dict[str, int]:
    return {axis.name: axis.size for axis in progress.job.mesh}


def test_a_table_shrinks_pauses_and_goes_on_and_the_scheduler_hears_of_it(two):
    with Hook() as hook, job(two, parallelizer=TABLE, webhook=hook.url) as scheduler:
        assert hook.events.get(timeout=30)["event"] == "done"  # the import
        assert hook.refused == 1
        messages = notify(scheduler, {"node0": 0, "node1": 3}, "r1")
        done = messages[-1]
        assert done.phase == "done" and {m.phase for m in messages} <= {
            "planning",
            "staging",
            "committing",
            "done",
        }
        assert mesh_of(done) == {"pp": 2, "tp": 1}
        assert {name: list(each.ranks) for name, each in done.job.nodes.items()} == {"node1": [0, 1]}
        assert done.job.generation == 2
        event = hook.events.get(timeout=30)
        assert (event["event"], event["request_id"], event["format"]) == ("done", "r1", "tenplexfs-event")
        assert event["job"]["mesh"] == {"pp": 2, "tp": 1} and event["job"]["nodes"] == {"node1": [0, 1]}
        for node in two.nodes:
            check(node.mount, "gpt", WHOLE)

        # what is so already, by another id and by the same; the same id for something else
        assert notify(scheduler, {"node1": 2}, "r2")[-1].job.txid == done.job.txid
        assert notify(scheduler, {"node0": 0, "node1": 3}, "r1")[-1].job.txid == done.job.txid
        with pytest.raises(InvalidError, match="request 'r1' was made before and asked for something else"):
            notify(scheduler, {"node0": 4}, "r1")
        with pytest.raises(InvalidError, match="nodes: node9: no such node is known; known: node0, node1"):
            notify(scheduler, {"node9": 4})

        paused = notify(scheduler, {"node1": 1}, "r3")[-1]
        assert paused.phase == "done" and "the table begins with 2 devices, there are 1" in paused.message
        assert (paused.job.state, paused.job.generation) == ("paused", 3)
        for node in two.nodes:
            until(lambda node=node: node.ok("job", "show", "gpt")["state"] == "paused")
            status = json.loads((node.mount / ".tenplexfs/jobs/gpt/status.json").read_text())
            assert (status["state"], status["message"][:9]) == ("paused", "the table")
            check(node.mount, "gpt", WHOLE)
        assert notify(scheduler, {"node1": 1}, "r4")[-1].job.txid == paused.job.txid
        two.nodes[1].stop()
        two.nodes[1].start()
        two.nodes[1].wait()
        assert two.nodes[1].ok("job", "show", "gpt")["state"] == "paused"

        again = notify(scheduler, {"node1": 2}, "r5")[-1]  # the same layout
        assert (again.job.state, again.job.generation) == ("ready", 4)
        assert mesh_of(again) == {"pp": 2, "tp": 1}
        grown = notify(scheduler, {"node0": 2, "node1": 2}, "r6")[-1]
        assert mesh_of(grown) == {"pp": 2, "tp": 2}
        check(two.nodes[0].mount, "gpt", WHOLE)


def test_a_program_decides(two):
    program = two.base / "alpa"
    told = two.base / "told.json"
    program.write_text(f'#!/bin/sh\ncat > {told}\necho \'{{"mesh": {{"pp": 1, "tp": 3}}}}\'\n')
    program.chmod(0o755)
    with job(two, parallelizer={"kind": "command", "argv": [str(program)]}) as scheduler:
        with pytest.raises(
            InvalidError, match=r"parallelizer: its layout is refused: .* 8 does not divide by 3"
        ):
            notify(scheduler, {"node0": 1, "node1": 2})
        resources = json.loads(told.read_text())
        assert resources["nodes"] == {"node0": 1, "node1": 2} and resources["step"] == 7
        assert resources["layout"]["mesh"] == {"pp": 2, "tp": 2}
        program.write_text("#!/bin/sh\necho nothing works >&2\nexit 3\n")
        with pytest.raises(InvalidError, match=r"alpa: ended with status 3: nothing works"):
            notify(scheduler, {"node0": 1, "node1": 2})
        program.write_text('#!/bin/sh\ncat >/dev/null; echo \'{"tp": 1, "pp": 4}\'\n')
        assert mesh_of(notify(scheduler, {"node0": 2, "node1": 2})[-1]) == {"pp": 4, "tp": 1}
        check(two.nodes[1].mount, "gpt", WHOLE)


def test_without_a_parallelizer_the_mesh_stays(two):
    with job(two) as scheduler:
        done = notify(scheduler, {"node1": 4})[-1]
        assert {name: list(each.ranks) for name, each in done.job.nodes.items()} == {"node1": [0, 1, 2, 3]}
        with pytest.raises(InvalidError, match="3 devices for 4 ranks, and the job has no parallelizer"):
            notify(scheduler, {"node1": 3})
        first = two.nodes[0]
        assert first.ok("reconfigure", "gpt", "--resources", "node0=4")["job"]["nodes"] == {
            "node0": [0, 1, 2, 3]
        }
        paused = first.ok("reconfigure", "gpt", "--resources", "none")["job"]
        assert (paused["state"], paused["message"]) == ("paused", "there are no devices")
        assert tenplexfs.wait(first.mount / "gpt", state="paused", timeout_s=10)["state"] == "paused"
        for wrong in ("node0", "node0=x", "node0=1,node0=2", ""):
            status, content, _ = first.run("reconfigure", "gpt", "--resources", wrong)
            assert status == 2 and "need nodes with devices" in content["error"]["message"], content
        request = control_pb2.NotifyResourcesRequest(
            job="gpt", nodes={"node0": 4}, stop_timeout_s=float("nan")
        )
        with pytest.raises(InvalidError, match="stop timeout: need seconds >= 0, got nan"):
            list(scheduler.stream("Control/NotifyResources", request, deadline_s=60))
        check(two.nodes[0].mount, "gpt", WHOLE)


def test_settings_change_while_there_is_state(two):
    def status(node: Daemon) -> dict[str, Any]:
        return json.loads((node.mount / ".tenplexfs/jobs/gpt/status.json").read_text())

    def persists_to(place: Path) -> bool:
        return status(a)["persist"]["to"] == str(place) and any(place.glob("gpt/*/manifest.json"))

    def used(node: Daemon) -> int:
        return int(json.loads((node.mount / ".tenplexfs/status.json").read_text())["store"]["used_bytes"])

    a, b = two.nodes
    with job(two, keep_steps=1):
        held = [used(node) for node in two.nodes]
        places = [two.base / "first", two.base / "second"]
        setting = f'persist={{"to": "{places[0]}"}}'
        made = b.ok("job", "set", "gpt", "replicas=1", setting, "memory=64MiB")
        assert made["generation"] == 2 and made["step"] == 7
        assert made["settings"] == {
            "keep_steps": 1,
            "memory": 64 << 20,
            "persist": {"to": str(places[0]), "every": 1, "keep": 3},
            "replicas": 1,
        }
        until(lambda: persists_to(places[0]))
        until(lambda: all(status(node)["replicas"]["is_complete"] for node in two.nodes))
        for node in two.nodes:
            check(node.mount, "gpt", WHOLE)
        assert a.ok("job", "set", "gpt", "replicas=1", setting, "webhook=")["txid"] == made["txid"]

        for wrong, said in (
            ("colour=", "setting 'colour': unknown; there are: keep_steps, "),
            ("replicas=many", "setting 'replicas': need a whole number >= 1, got 'many'"),
        ):
            done, content, _ = a.run("job", "set", "gpt", "keep_steps=9", wrong)
            assert done == 1 and content["error"]["message"].startswith(said), content
        assert a.run("job", "set", "none", "replicas=1")[1]["error"]["code"] == "NOT_FOUND"
        assert a.job()["generation"] == 2

        changed = a.ok("job", "set", "gpt", "replicas=", f'persist={{"to": "{places[1]}"}}', "memory=")
        assert changed["generation"] == 3 and changed["settings"].keys() == {"keep_steps", "persist"}
        until(lambda: persists_to(places[1]))
        until(lambda: all(used(node) == alone for node, alone in zip(two.nodes, held, strict=True)))


def test_the_ranks_stop_and_save_before_the_job_pauses(two):
    a, b = two.nodes
    with job(two, parallelizer=TABLE) as scheduler, ranks(a, a, b, b) as group:
        all_do(group, "load", 0)
        assert all_do(group, "should_stop", 8) == [False] * 4
        answers: list[control_pb2.Progress] = []
        failures: list[TenplexError] = []

        def ask() -> None:
            try:
                answers.extend(notify(scheduler, {"node0": 1}))
            except TenplexError as error:
                failures.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: (a.mount / ".tenplexfs/jobs/gpt/stop").read_text() != "-\n")
        assert all_do(group, "should_stop", 9) == [True] * 4
        assert len(set(all_do(group, "save", 9, True))) == 1
        thread.join(30)
        assert not failures
        done = answers[-1]
        assert any(message.phase == "stopping" for message in answers)
        assert (done.job.state, done.job.step) == ("paused", 9)


def test_the_mesh_that_a_model_is_quickest_on(two, tmp_path: Path):
    """The cost model through the daemon: tensor parallelism stays on one node."""
    tensors = {"w": {"shape": [64, 64], "dtype": "float32", "shard": [{"axis": "tp", "dim": 0}]}}
    layout = {"format": "tenplexfs-layout", "version": 1, "mesh": {"pp": 1, "dp": 1, "tp": 1}}
    file = tmp_path / "layout.json"
    file.write_text(json.dumps({**layout, "nodes": {"node0": [0]}, "tensors": tensors}))
    auto = {
        "kind": "auto",
        "model": "gpt3-6.7b",
        "global_batch": 64,
        "memory_bytes": 48e9,
        "intra_node": "300GB/s",
    }
    first = two.nodes[0]
    setting = f"parallelizer={json.dumps(auto)}"
    first.ok("job", "create", "big", "--layout", str(file), "--set", setting)
    scheduler = Connection(f"127.0.0.1:{two.ports['node1']}")
    try:
        done = notify(scheduler, {"node0": 4, "node1": 4}, name="big")[-1]
        mesh = mesh_of(done)
        assert mesh["tp"] * mesh["pp"] * mesh["dp"] == 8 and mesh["tp"] > 1
        for ranks_there in done.job.nodes.values():
            held = sorted(ranks_there.ranks)
            assert len(held) == 4 and len({rank // mesh["tp"] for rank in held}) == 4 // mesh["tp"]
        paused = notify(scheduler, {"node0": 1}, name="big")[-1]
        assert paused.job.state == "paused"
        assert "no degrees fit on 1 devices: the least is " in paused.job.message
    finally:
        scheduler.close()
        first.ok("job", "remove", "big")
