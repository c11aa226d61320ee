"""One daemon for all tests of the HTTP edge, and a job at step 3."""

from __future__ import annotations

import pytest

from tests.cluster.daemons import Daemons
from tests.http.jobs import LAYOUT, Node, state_of
from tests.http.tenplex import Server
from tests.ports import free_port


@pytest.fixture(scope="package")
def node(tmp_path_factory):
    port = free_port()
    base = tmp_path_factory.mktemp("http")
    with Daemons(base, 1, memory="256MiB", http=f"127.0.0.1:{port}") as daemons:
        made = Node(daemons.nodes[0], Server(port))
        yield made
        assert "Traceback" not in made.daemon.log.read_text()


@pytest.fixture(scope="package")
def job(node):
    """A job at step 3, saved as Tenplex does."""
    name = node.job({**LAYOUT, "nodes": {"node0": [0, 1]}})
    for step in (1, 2, 3):
        assert (
            node.http.save(state_of(0, step), name, step, 0)
            == f"step {step}: waits: rank 1: nothing was uploaded"
        )
        assert f"step {step}: is committed, 1:{step}:" in node.http.save(state_of(1, step), name, step, 1)
    return name
