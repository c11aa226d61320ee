"""Puts arrays of flat indices on eight devices and prints layouts and what each device got."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tenplexfs.errors import TenplexError
from tenplexfs.formats.layout_json import layout_text
from tenplexfs.jax import layout_of

P = PartitionSpec


def case(state, mesh=None, order=None):
    """Returns the layout of ``state`` and the local indices by rank, ``order`` being the ranks' devices."""
    held = {}
    for path, array in state.items():
        for shard in array.addressable_shards:
            local = np.asarray(shard.data, np.int64)
            held.setdefault(order.index(shard.device), {})[path.replace(".", "/")] = local.tolist()
    return {"layout": json.loads(layout_text(layout_of(state, mesh=mesh))), "held": held}


def refused(state, **options):
    try:
        layout_of(state, **options)
    except TenplexError as error:
        return error.message
    return "was taken"


def main():
    devices = jax.devices()
    assert len(devices) == 8
    grid = Mesh(np.array(devices).reshape(2, 2, 2), ("data", "fsdp", "model"))

    def put(shape, mesh, spec, dtype="int32"):
        whole = jnp.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
        return jax.device_put(whole, NamedSharding(mesh, spec))

    specs = {
        "whole": P(),
        "rows": P("model"),
        "columns": P(None, "model"),
        "both": P("fsdp", "model"),
        "joined": P(("fsdp", "model")),
        "swapped": P(("model", "fsdp"), "data"),
        "all": P(("data", "fsdp", "model"), None),
    }
    by_spec = {f"layers.{name}": put((8, 4), grid, spec) for name, spec in specs.items()}
    by_spec["scalar"] = put((), grid, P())
    by_spec["half"] = put((4, 2), grid, P("data"), "bfloat16")
    by_spec["empty"] = put((0, 4), grid, P(None, "model"))

    backwards = devices[::-1]
    turned = Mesh(np.array(backwards).reshape(4, 2), ("a", "b"))
    part = Mesh(np.array(devices[2:6]).reshape(2, 2), ("x", "y"))
    mixed = {
        "turned": put((4, 6), turned, P("a", "b")),
        "other": put((4, 6), Mesh(np.array(devices).reshape(4, 2), ("a", "b")), P("a", "b")),
        "part": put((4, 6), part, P("x", "y")),
        "one": jax.device_put(jnp.arange(3), SingleDeviceSharding(devices[5])),
    }
    stages = Mesh(np.array(devices).reshape(2, 4), ("pp", "tp"))
    second = Mesh(np.array(devices[4:]), ("tp",))
    pipeline = {"a": put((8,), stages, P("tp")), "b": put((8,), second, P("tp"))}
    cases = {
        "specs": case(by_spec, order=devices),
        "mixed": case(mixed, order=backwards),
        "pipeline": case(pipeline, order=devices),
        "single": case({"w": jnp.arange(4)}, order=devices[:1]),
    }
    struct = (8, 4), jnp.float32, NamedSharding(grid, P("fsdp"))
    cases["tuples"] = {"layout": json.loads(layout_text(layout_of({"w": struct}))), "held": {}}
    typed = Mesh(grid.devices, grid.axis_names, axis_types=(AxisType.Explicit,) * 3)
    messages = {
        "uneven": refused({"a.b": ((7, 4), jnp.float32, NamedSharding(grid, P("fsdp")))}),
        "outside": refused({"w": by_spec["layers.rows"]}, mesh=part),
        "key": refused({"k": jax.random.key(0)}),
        "list": refused({"w": [1]}),
        "twice": refused({"a.b": by_spec["scalar"], "a/b": by_spec["scalar"]}),
        "unreduced": refused({"w": ((8,), jnp.float32, NamedSharding(typed, P(unreduced={"fsdp"})))}),
    }
    print(json.dumps({"cases": cases, "messages": messages}))  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main()
