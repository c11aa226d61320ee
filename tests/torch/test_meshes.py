"""Meshes of three dims and stages of them, and daemons that die in the middle, on gloo ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster.daemons import Daemons, until
from tests.torch.groups import Ranks

pytestmark = [pytest.mark.cluster, pytest.mark.mount]


@pytest.fixture(scope="module")
def ranks():
    made = Ranks("tests.torch.mesh_checks")
    yield made
    made.end()


def test_meshes_of_three_dims_and_stages_of_them(ranks, tmp_path):
    with Daemons(tmp_path, 2, memory="128MiB") as daemons:
        a, b = daemons.nodes
        for world in (8, 4, 2):
            ranks.run("cubes", tmp_path, [(a, b)[rank * 2 // world] for rank in range(world)])


def test_a_daemon_is_killed_in_the_middle_of_a_load_and_of_a_save(ranks, tmp_path):
    with Daemons(tmp_path, 1, memory="128MiB") as daemons:
        (node,) = daemons.nodes

        def restart() -> None:
            for name in ("load", "save"):
                until((tmp_path / f"{name}.kill").exists)
                node.kill()
                node.start()
                node.wait()
                (tmp_path / f"{name}.go").touch()

        with ThreadPoolExecutor(1) as pool:
            restarts = pool.submit(restart)
            ranks.run("interrupted", tmp_path, [node, node])
            restarts.result()
        assert node.job()["step"] == 2
        assert node.ok("verify")["mismatches"] == []
