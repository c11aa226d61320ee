"""What processes do in the tests of `tenplexfs.jax.save` and `load`; all of a group run the same check."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tenplexfs.jax
from tenplexfs.errors import TenplexError

P = PartitionSpec


class Adam(NamedTuple):
    """As optax's state: a count and two trees like the parameters."""

    count: Any
    mu: Any
    nu: Any


class Empty(NamedTuple):
    """As optax's empty state."""


class Frame:
    def __init__(self, params: Any, step: Any) -> None:
        self.params, self.step = params, step


jax.tree_util.register_pytree_with_keys(
    Frame,
    lambda f: (
        ((jax.tree_util.GetAttrKey("params"), f.params), (jax.tree_util.GetAttrKey("step"), f.step)),
        None,
    ),
    lambda _, children: Frame(*children),
)


def grid(shape: tuple[int, ...], names: str, *, backwards: bool = False) -> Mesh:
    count = int(np.prod(shape))
    devices = jax.devices()[:count][::-1] if backwards else jax.devices()[:count]
    return Mesh(np.array(devices).reshape(shape), tuple(names.split()))


def whole(shape: tuple[int, ...], dtype: str, salt: int) -> np.ndarray:
    """Returns values that no two places of a tensor share, as far as the dtype can tell them apart."""
    return ((np.arange(int(np.prod(shape))) * 7 + salt) % 251).reshape(shape).astype(jnp.dtype(dtype))


SHAPES = {
    "rows": ((16, 6), "float32"),
    "columns": ((6, 16), "bfloat16"),
    "both": ((8, 16), "float32"),
    "small": ((3,), "float16"),
    "bytes": ((8, 2), "float8_e4m3fn"),
    "flags": ((8,), "bool"),
    "scalar": ((), "int32"),
    "empty": ((0, 8), "float32"),
    "dotted.name": ((8, 8), "float32"),
}


def tree(place: Any, salt: int = 0) -> Any:
    """Returns a state; ``place(name, array)`` puts each of its arrays somewhere."""
    params = {name: place(name, whole(*kind, salt)) for name, kind in SHAPES.items()}
    moments = [
        {name: place(name, whole(*SHAPES[name], salt + n)) for name in ("rows", "both")} for n in (3, 5)
    ]
    return {
        "frame": Frame({"layers": [params]}, place("scalar", np.array(7 + salt, np.int32))),
        "optimizer": (Adam(place("scalar", np.array(salt, np.int32)), *moments), Empty(), (None, [])),
        "host": np.arange(5) + salt,
        "lr": 0.5 + salt,
        "name": "adam",
        "maps": OrderedDict(a=np.float32(2.5), b={}),
    }


def specs(name: str, data: str | tuple[str, ...] | None, model: str | None) -> PartitionSpec:
    return {
        "rows": P(model),
        "columns": P(None, model),
        "both": P(data, model),
        "bytes": P(data),
        "flags": P(model),
        "empty": P(None, model),
        "dotted.name": P(model, data),
    }.get(name, P())


def put(mesh: Mesh, data: Any, model: Any, *, alone: bool = False) -> Any:
    def place(name: str, array: np.ndarray) -> jax.Array:
        if alone:
            return jax.device_put(array, jax.local_devices()[-1])
        sharding = NamedSharding(mesh, specs(name, data, model))
        return jax.make_array_from_callback(
            array.shape, sharding, lambda index: array[index], dtype=array.dtype
        )

    return place


def structs(tree: Any) -> Any:
    def struct(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(struct, tree)


def same(found: Any, wanted: Any) -> None:
    a, b = jax.tree.leaves(found), jax.tree.leaves(wanted)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(a, b, strict=True):
        if not isinstance(y, jax.Array):
            assert type(x) is type(y) and np.array_equal(x, y), (x, y)
            continue
        assert (x.shape, x.dtype) == (y.shape, y.dtype) and x.sharding.is_equivalent_to(y.sharding, y.ndim)
        for p, q in zip(x.addressable_shards, y.addressable_shards, strict=True):
            assert p.device == q.device and p.index == q.index
            assert np.asarray(p.data).tobytes() == np.asarray(q.data).tobytes()


def keys(mesh: Mesh, seed: int) -> Any:
    sharding = NamedSharding(mesh, P(mesh.axis_names[0]))
    made = jax.jit(lambda: jax.random.split(jax.random.key(seed), 8), out_shardings=sharding)()
    return {
        "rng": made,
        "one": jax.jit(lambda: jax.random.key(seed), out_shardings=NamedSharding(mesh, P()))(),
    }


def at_all_meshes(job: Path, salt: int) -> None:
    for shape, names, data, model in (
        ((8,), "x", None, "x"),
        ((2, 4), "d m", "d", "m"),
        ((4, 2), "m d", "d", "m"),
        ((2, 2, 2), "a b c", ("c", "a"), "b"),
    ):
        for backwards in (False, True):
            wanted = tree(put(grid(shape, names, backwards=backwards), data, model), salt)
            same(tenplexfs.jax.load(job, like=structs(wanted)), wanted)
    alone = tree(put(grid((8,), "x"), None, None, alone=True), salt)
    same(tenplexfs.jax.load(job, like=structs(alone)), alone)


def save_at(job: Path, shape: list[int], names: str, step: int, *, load: bool) -> None:
    """Saves a step at a mesh, after a load of the step before where there is one."""
    mesh = grid(tuple(shape), names)
    place = put(mesh, "data", "model")
    if load:
        wanted = tree(place, step - 1)
        same(tenplexfs.jax.load(job, like=structs(wanted)), wanted)
    tenplexfs.jax.save(tree(place, step), job, step=step)


def load_everywhere(job: Path, step: int) -> None:
    at_all_meshes(job, step)


def random_keys(job: Path) -> None:
    state = keys(grid((8,), "x"), 3)
    job = job.with_name("keys")
    tenplexfs.jax.save(state, job, step=1)
    for shape, names in (((8,), "x"), ((4, 2), "x y")):
        wanted = keys(grid(shape, names), 3)
        found = tenplexfs.jax.load(job, like=structs(keys(grid(shape, names), 4)))
        for name, key in wanted.items():
            assert found[name].dtype == key.dtype
            same(jax.random.key_data(found[name]), jax.random.key_data(key))
    other = {"rng": jax.random.key(0, impl="rbg"), "one": jax.random.key(0)}
    said = refusal(lambda: tenplexfs.jax.load(job, like=other))
    assert "rng/key_data: is uint32 [8, 2], asked for uint32 [4]" in said, said


def one_device(job: Path) -> None:
    job = job.with_name("alone")
    state = {"w": jnp.arange(6.0), "b": [jnp.ones((), jnp.bfloat16)], "n": 3}
    tenplexfs.jax.save(state, job, step=1)
    assert json.loads((job / "layout.json").read_text())["mesh"] == {"rank": 1}
    same(tenplexfs.jax.load(job, like=structs(state)), state)
    sharding = NamedSharding(grid((2,), "x"), P("x"))
    wanted = {**state, "w": jax.device_put(state["w"], sharding)}
    same(tenplexfs.jax.load(job, like=structs(wanted)), wanted)


def refusal(work: Any) -> str:
    try:
        work()
    except TenplexError as error:
        return error.message
    return "was taken"


def refusals(job: Path) -> dict[str, str]:
    """What is refused, on every process alike."""
    mesh, own = grid((4, 2), "data model"), jax.process_index()
    place = put(mesh, "data", "model")
    state = tree(place, 1)
    save, load = tenplexfs.jax.save, tenplexfs.jax.load
    turned = grid((2, 4), "model data")  # the same shapes at other ranks
    other = NamedSharding(mesh, P())
    struct = jax.ShapeDtypeStruct
    said = {
        "unsaid": lambda: save(state, job, step=9),
        "absent": lambda: load(job.with_name("absent"), like={"host": np.zeros(5)}),
        "missing": lambda: load(job, like={"nope": np.zeros(5), "host": np.zeros((5, 1), np.int32)}),
        "value": lambda: load(job, like={"host": np.zeros(5, np.int64), "gone": 3}),
        "bare": lambda: load(job, like={"host": struct((5,), jnp.int32)}),
    }
    found = {name: refusal(work) for name, work in said.items()}
    load(job, like=structs(state))
    told = {
        "turned": lambda: save(tree(put(turned, "data", "model"), 1), job, step=9),
        "world": lambda: save(tree(put(grid((2, 2), "data model"), "data", "model"), 1), job, step=9),
        "extra": lambda: save(
            {**state, "extra": jax.device_put(np.zeros(8), other)},
            job,
            step=9,
        ),
        "past": lambda: save(state, job, step=1),
        "object": lambda: save({**state, "lr": object() if own else 0.5}, job, step=9),
        "differ": lambda: save({**state, "host": state["host"] + own}, job, step=9),
    }
    return {**found, **{name: refusal(work) for name, work in told.items()}}


def main() -> None:
    order = json.loads(sys.argv[1])
    faulthandler.dump_traceback_later(90, exit=True)  # what hangs, says where
    if order["processes"] > 1:
        jax.distributed.initialize(order["address"], order["processes"], order["process"])
    result = globals()[order["check"]](Path(order["job"]), **order["arguments"])
    print(json.dumps(result))  # noqa: T201 - what the test reads
    sys.stdout.flush()
    os._exit(0)  # the runtime would wait for the other processes


if __name__ == "__main__":
    main()
