"""A job with state on the nodes of `cluster`, and what moves it."""

from __future__ import annotations

from tenplexfs.core.build import build_ptc
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.runtime.coordinator import Change
from tenplexfs.runtime.orders import Progress
from tenplexfs.runtime.planning import Target
from tests.runtime.cluster import JOB, Cluster, layout_json, tensors_of

MESHES = [{"pp": 1, "tp": 4}, {"pp": 4, "tp": 1}, {"pp": 1, "tp": 1}, {"pp": 2, "tp": 2}]
WHOLE = tensors_of(build_ptc(parse_layout(layout_json())))


async def ready(cluster: Cluster, **changes: object) -> None:
    await cluster.nodes[0].coordinator.create(JOB, layout_json(**changes), b"{}")
    await cluster.load(WHOLE)


async def move(cluster: Cluster, by: int = 0, **asked: object) -> list[Progress]:
    """Returns what was said on the way; ``asked``: fields of `Change`, or mesh and nodes of its target."""
    seen: list[Progress] = []
    target = asked.pop("target", None) or Target(mesh=asked.pop("mesh", {}), nodes=asked.pop("nodes", None))
    await cluster.nodes[by].coordinator.reconfigure(Change(JOB, target, **asked), seen.append)
    return seen


def used(cluster: Cluster) -> list[int]:
    """Returns how many snapshots each node stores."""
    return [len(node.store.snapshots()) for node in cluster.nodes]
