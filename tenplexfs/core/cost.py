"""What a step of a GPT-like model costs at some degrees of parallelism, and how much memory it takes.

Analytic, for comparing degrees (tp, pp, dp) with each other, not for predicting seconds. Ranks that share
matrices are neighbours, then replicas, then stages, as Megatron orders them; a group that fits on a node uses
the links inside it, any other one the network, whose link the groups of a node share.

Source: FLOPs and the bubble of the pipeline: Narayanan et al., "Efficient Large-Scale Language Model Training
on GPU Clusters Using Megatron-LM" (arXiv 2104.04473, sections 2.2, 3.2 and 5); activations: Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models" (2205.05198, table 2); bytes of the state
and ZeRO: Rajbhandari et al. (1910.02054, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tenplexfs.core.presets import Transformer
from tenplexfs.errors import InvalidError

__all__ = [
    "Degrees",
    "Devices",
    "Estimate",
    "Training",
    "best_first",
    "estimate",
    "fits_on_nodes",
    "parameters",
]

_WEIGHT_BYTES = 2
_ACTIVATION_BYTES = 2
_LOGIT_BYTES = 6  # half precision, and float32 for the loss
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Devices:
    """What the hardware can do; the defaults are of an A100 with NVLink and 200 Gbit/s a node.

    Attributes:
        memory_bytes: Of one device.
        memory_fraction: How much of it may be used.
        flops_per_s: That one device reaches in large matrix products.
        intra_node_bytes_per_s: Of a device's links inside its node, one way.
        inter_node_bytes_per_s: Of a node's link to the network, one way.
        latency_s: Of one message.
    """

    memory_bytes: float = 80e9
    memory_fraction: float = 0.9
    flops_per_s: float = 140e12
    intra_node_bytes_per_s: float = 200e9
    inter_node_bytes_per_s: float = 25e9
    latency_s: float = 1e-5

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0) and not (name == "latency_s" and value == 0):
                raise InvalidError(f"{name}: need a number > 0, got {value!r}")
        if self.memory_fraction > 1:
            raise InvalidError(f"memory_fraction: need at most 1, got {self.memory_fraction!r}")


@dataclass(frozen=True, slots=True)
class Training:
    """How the model is trained.

    Attributes:
        global_batch: Sequences a step, the same for any degrees.
        sequence: Tokens of one.
        micro_batch: Sequences that a stage works on at a time.
        gradient_bytes: Of one parameter; all-reduced in this width.
        optimizer_bytes: Of one parameter: Adam's float32 master copy, first and second moment.
        zero: Whether the optimizer's state is cut over the replicas.
        recompute: What is not kept for the backward pass: nothing, the attention, or whole layers.
    """

    global_batch: int
    sequence: int = 2048
    micro_batch: int = 1
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    zero: bool = False
    recompute: Literal["none", "selective", "full"] = "selective"

    def __post_init__(self) -> None:
        for name in ("global_batch", "sequence", "micro_batch"):
            if getattr(self, name) < 1:
                raise InvalidError(f"{name}: need >= 1, got {getattr(self, name)}")
        for name in ("gradient_bytes", "optimizer_bytes"):
            if getattr(self, name) < 0:
                raise InvalidError(f"{name}: need >= 0, got {getattr(self, name)}")
        if self.global_batch % self.micro_batch:
            raise InvalidError(
                f"micro_batch {self.micro_batch} does not divide the global batch {self.global_batch}"
            )


@dataclass(frozen=True, slots=True, order=True)
class Degrees:
    """How many ranks share each matrix, how many stages and how many replicas there are."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True)
class Estimate:
    """What degrees would cost.

    Attributes:
        step_s: Time of one step.
        memory_bytes: Of the device that needs most.
        together: Axes whose ranks are taken to be on one node.
    """

    degrees: Degrees
    step_s: float
    memory_bytes: float
    together: tuple[str, ...]


def parameters(model: Transformer) -> int:
    """Returns the number of parameters in matrices, and the embeddings; biases and norms not."""
    ends = model.vocab * model.hidden * (1 if model.is_tied else 2) + model.positions * model.hidden
    return model.layers * _layer(model) + ends


def fits_on_nodes(block: int, count: int, nodes: Mapping[str, int]) -> bool:
    """Says whether ``count`` groups of ``block`` ranks each find a node of their own to be together on.

    >>> fits_on_nodes(2, 4, {"a": 4, "b": 5}), fits_on_nodes(4, 3, {"a": 8, "b": 3})
    (True, False)
    """
    return sum(devices // block for devices in nodes.values()) >= count


def estimate(
    model: Transformer, training: Training, devices: Devices, degrees: Degrees, nodes: Mapping[str, int]
) -> Estimate:
    """Returns what a step takes.

    Args:
        model: Dense; what it says of experts is not looked at.
        training: How it is trained.
        devices: The hardware.
        degrees: Must divide: heads, layers and batch.
        nodes: Node -> devices.
    """
    t, p, d = degrees.tp, degrees.pp, degrees.dp
    b, s, h = training.micro_batch, training.sequence, model.hidden
    micro_batches = training.global_batch // (d * b)
    tp_inside = fits_on_nodes(t, p * d, nodes)
    dp_inside = tp_inside and fits_on_nodes(t * d, p, nodes)
    all_inside = fits_on_nodes(degrees.size, 1, nodes)
    width = max(nodes.values())
    per_node = min(width, degrees.size)
    inside, outside = devices.intra_node_bytes_per_s, devices.inter_node_bytes_per_s

    layers = model.layers / p
    again = 4 / 3 if training.recompute == "full" else 1
    layer_flops = b * s * (6 * _layer(model) + 12 * h * s) * again
    head_flops = 6 * b * s * model.vocab * h
    compute_s = (layers * layer_flops + head_flops) / (t * devices.flops_per_s)

    block_bytes = b * s * h * _ACTIVATION_BYTES
    reduces = layers * (6 if training.recompute == "full" else 4)
    tp_s = reduces * _all_reduce_s(block_bytes, t, inside if tp_inside else outside, devices.latency_s)
    sharing = max(1, min(d, per_node // t))  # replicas of a node that pass on at the same time
    pp_bytes_per_s = inside if all_inside else outside / sharing
    pp_s = 0.0 if p == 1 else 2 * (block_bytes / pp_bytes_per_s + devices.latency_s)

    held = _held_parameters(model, degrees)
    gradients = held * training.gradient_bytes
    dp_bytes_per_s = inside if dp_inside or all_inside else outside / max(1, min(t, per_node))
    dp_s = _all_reduce_s(gradients, d, dp_bytes_per_s, devices.latency_s)
    step_s = (micro_batches + p - 1) * (compute_s + tp_s + pp_s) + dp_s

    optimizer = training.optimizer_bytes / (d if training.zero else 1)
    state = held * (_WEIGHT_BYTES + training.gradient_bytes + optimizer)
    kept = layers * min(p, micro_batches) * _layer_activation_bytes(model, training, t)
    logits = b * s * model.vocab * _LOGIT_BYTES / t
    together = (("tp",) if tp_inside and t > 1 else ()) + (("dp",) if dp_inside and d > 1 else ())
    return Estimate(degrees, step_s, state + kept + logits, together)


def best_first(
    model: Transformer,
    training: Training,
    devices: Devices,
    nodes: Mapping[str, int],
    *,
    each: int = 1,
    axes: tuple[str, ...] = ("tp", "pp", "dp"),
) -> tuple[list[Estimate], str]:
    """Returns the degrees that fit, the quickest first, and in words why there are none.

    Not all devices have to be used.

    Args:
        model: Dense.
        training: How it is trained.
        devices: The hardware.
        nodes: Node -> devices.
        each: Ranks that other axes make of each (tp, pp, dp).
        axes: Those that may be larger than 1.
    """
    total = sum(nodes.values()) // each
    if not total:
        return [], f"{sum(nodes.values())} devices, and each replica takes at least {each}"
    legal = [
        Degrees(t, p, d)
        for t in _divisors(model.heads, total)
        if (model.kv_heads % t == 0 or t % model.kv_heads == 0) and model.ffn % t == 0
        for p in _divisors(model.layers, total // t)
        for d in _divisors(training.global_batch // training.micro_batch, total // (t * p))
        if all(size == 1 or axis in axes for axis, size in (("tp", t), ("pp", p), ("dp", d)))
    ]
    found = [estimate(model, training, devices, degrees, nodes) for degrees in legal]
    room = devices.memory_bytes * devices.memory_fraction
    fitting = [each for each in found if each.memory_bytes <= room]
    if fitting:
        return sorted(fitting, key=lambda e: (e.step_s, e.degrees)), ""
    least = min(found, key=lambda e: (e.memory_bytes, e.degrees))
    t, p, d = least.degrees.tp, least.degrees.pp, least.degrees.dp
    return [], (
        f"no degrees fit on {sum(nodes.values())} devices: the least is {least.memory_bytes / _GIB:.1f} GiB "
        f"a device, by tp={t}, pp={p}, dp={d}; {room / _GIB:.1f} GiB may be used"
    )


def _layer(model: Transformer) -> int:
    """Returns the parameters in the matrices of a layer."""
    kv_width = model.hidden // model.heads * model.kv_heads
    attention = model.hidden * (2 * model.hidden + 2 * kv_width)
    return attention + model.hidden * model.ffn * (3 if model.gated else 2)


def _held_parameters(model: Transformer, degrees: Degrees) -> float:
    """Returns the parameters of a rank of the stage that holds most: the first, or the last."""
    word = model.vocab * model.hidden
    first = word + model.positions * model.hidden
    ends = first + (0 if model.is_tied else word) if degrees.pp == 1 else max(first, word)
    return (model.layers / degrees.pp * _layer(model) + ends) / degrees.tp


def _layer_activation_bytes(model: Transformer, training: Training, t: int) -> float:
    block = training.sequence * training.micro_batch * model.hidden
    if training.recompute == "full":
        return 2.0 * block
    scores = 5 * model.heads * training.sequence / (model.hidden * t) if training.recompute == "none" else 0
    return block * (10 + 24 / t + scores)


def _all_reduce_s(nbytes: float, ranks: int, bytes_per_s: float, latency_s: float) -> float:
    """Returns the time of a ring."""
    return 2 * (ranks - 1) * (nbytes / ranks / bytes_per_s + latency_s)


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]
