"""What a rank holds of each parameter, as DeepSpeed itself records it.

ZeRO 1 and 2 (and the bf16 optimizer) join the parameters of a group, pad them and cut them in equal parts,
one a rank: ``param._hp_mapping`` says which run of the raveled parameter the rank's part has
(`tensor_fragment`). ZeRO 3 cuts each parameter by itself, raveled and padded: ``param.ds_tensor`` is the
rank's part.

Source: deepspeed 0.19, `utils/tensor_fragment.py`, `runtime/zero/stage_1_and_2.py`, `stage3.py`,
`partition_parameters.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tenplexfs.core.paths import path_of_name
from tenplexfs.errors import InvalidError

__all__ = [
    "BIT16",
    "FP32",
    "Fragment",
    "Spec",
    "fragments_of",
    "groups_of",
    "path_of",
    "plain_of",
    "specs_of",
]

BIT16, FP32 = "model", "fp32"
Engine: TypeAlias = Any
_Flat: TypeAlias = Mapping[str, torch.Tensor]

# What the optimizers of ZeRO 3, of ZeRO 1 and 2, and of bf16 call the same.
_FLATS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
_PARAMS = ("fp16_groups", "bit16_groups", "bf16_groups")


@dataclass(frozen=True)
class Spec:
    """What a rank holds of a tensor; plain data.

    Attributes:
        shape: Global.
        dtype: Our name of its type.
        run: Begin and number of the elements of the raveled tensor; None where the rank has it whole.
        group: The flat group that the tensor is cut with, and where the run begins in the rank's part of it;
            None where it is cut by itself, or not at all.
    """

    shape: tuple[int, ...]
    dtype: str
    run: tuple[int, int] | None = None
    group: tuple[str, int] | None = None


class Fragment:
    """What this rank holds of one parameter.

    Attributes:
        name: Of the parameter.
        shape: Global.
        start, count: Of the run of the raveled parameter.
        kinds: `FP32` and the names of the optimizer's states; none where the rank has no part.
        is_part: Whether the parameter that is computed with is cut as well, as ZeRO 3 does.
        group: Number of the flat group and where the run begins in this rank's part; None for ZeRO 3.
    """

    def __init__(self, name: str, param: Any, rank: int, world: int, flats: Sequence[_Flat]) -> None:  # noqa: ANN401
        self.name = name
        self._param = param
        self._mapping = getattr(param, "_hp_mapping", None)
        self.group: tuple[int, int] | None = None
        self.kinds: tuple[str, ...] = ()
        self.is_part = hasattr(param, "ds_id")
        if self.is_part:
            self.shape = tuple(param.ds_shape)
            size = param.ds_tensor.ds_numel
            if size != -(-param.ds_numel // world):
                raise InvalidError(
                    f"parameter {name}: {size} of {param.ds_numel} elements a rank, of {world} ranks: "
                    "need ZeRO 3 over all of them, without expert or hierarchical parts"
                )
            self.start = min(size * rank, param.ds_numel)
            self.count = min(size, param.ds_numel - self.start)
            if param.requires_grad:
                group = param._z3_optimizer.grad_position[param._z3_optimizer.get_param_id(param)][0]
                self.kinds = tuple(flats[group])
            return
        self.shape = tuple(param.shape)
        self.start = self.count = 0
        if self._mapping is not None:
            address = self._mapping.lp_fragment_address
            self.start, self.count = address.start, address.numel
            self.group = self._mapping.param_group_index, self._mapping.hp_fragment_address.start
            self._flat = flats[self.group[0]]
            self.kinds = tuple(self._flat)

    def read(self, kind: str) -> torch.Tensor:
        """Returns the run of ``kind``, 1-d."""
        if self.group is not None:
            return torch.Tensor.detach(self._flat[kind])[self.group[1] : self.group[1] + self.count]
        key = None if kind == FP32 else kind
        found = self._param._z3_optimizer.get_local_fp32_param(self._param, key)
        return torch.Tensor.detach(found)[: self.count]

    def write(self, kind: str, data: torch.Tensor) -> None:
        """Sets the run of ``kind``."""
        if self.group is not None:
            self.read(kind).copy_(data)
            return
        key = None if kind == FP32 else kind
        optimizer = self._param._z3_optimizer
        part = optimizer.get_local_fp32_param(self._param, key).detach().clone()
        part[: self.count] = data
        optimizer.set_local_hp_param(part, self._param, key)

    @property
    def bit16(self) -> torch.Tensor:
        """The run of the parameter that is computed with: of ZeRO 3 the rank's, else all in its shape."""
        if self.is_part:
            return torch.Tensor.detach(self._param.ds_tensor)[: self.count]
        return torch.Tensor.detach(self._param)


def fragments_of(engine: Engine, rank: int, world: int) -> list[Fragment]:
    """Returns what this rank holds of each parameter of the model.

    Raises:
        InvalidError: The optimizer is none of ZeRO, or cuts over some ranks alone.
    """
    optimizer = engine.optimizer
    named = list(engine.module.named_parameters())
    is_known = any(hasattr(p, "ds_id") or hasattr(p, "_hp_mapping") for _, p in named)
    if optimizer is None or not is_known:
        raise InvalidError(
            f"optimizer {type(optimizer).__name__}: need ZeRO stage 1, 2 or 3, or the bf16 optimizer"
        )
    parts = _first(optimizer, _FLATS)
    return [
        Fragment(name, param, rank, world, [_flat(optimizer, part) for part in parts])
        for name, param in named
    ]


def _flat(optimizer: Any, part: torch.Tensor) -> _Flat:  # noqa: ANN401
    """Returns a rank's part of a group, and of the optimizer's states that go with its elements."""
    state = optimizer.optimizer.state.get(part, {})
    like = {key: each for key, each in state.items() if torch.is_tensor(each) and each.shape == part.shape}
    return {FP32: part, **like}


def _first(optimizer: Any, names: Sequence[str]) -> Any:  # noqa: ANN401
    for name in names:
        if hasattr(optimizer, name):
            return getattr(optimizer, name)
    raise InvalidError(f"optimizer {type(optimizer).__name__}: has none of {', '.join(names)}")


def plain_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Returns the buffers that a state dict has: every rank holds them whole."""
    kept = engine.module.state_dict().keys()
    return {name: buffer for name, buffer in engine.module.named_buffers() if name in kept}


def specs_of(fragments: list[Fragment], plain: Mapping[str, torch.Tensor]) -> dict[str, Spec]:
    """Returns the path and run of each tensor that this rank saves."""
    out: dict[str, Spec] = {}
    for each in fragments:
        data = each.bit16
        run = (each.start, each.count) if each.is_part else None
        out[path_of(BIT16, each.name)] = Spec(each.shape, _dtype(data), run)
        for kind in each.kinds:
            group = None if each.group is None else (f"group{each.group[0]}/{kind}", each.group[1])
            run = each.start, each.count
            out[path_of(kind, each.name)] = Spec(each.shape, _dtype(each.read(kind)), run, group)
    for name, buffer in plain.items():
        out[path_of(BIT16, name)] = Spec(tuple(buffer.shape), _dtype(buffer))
    return out


def path_of(kind: str, name: str) -> str:
    """Returns the path of what is kept of a parameter."""
    top = kind if kind in (BIT16, FP32) else f"optimizer/{path_of_name(kind)}"
    return f"{top}/{path_of_name(name)}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def groups_of(engine: Engine) -> Iterator[tuple[int, list[str], list[torch.Tensor]]]:
    """Yields for each group of the optimizer its number, the names of its parameters, and its flat parts."""
    optimizer = engine.optimizer
    names = {id(param): name for name, param in engine.module.named_parameters()}
    # ZeRO 3 parts a group of the optimizer further.
    of_part = getattr(optimizer, "sub_group_to_group_id", None)
    groups: dict[int, tuple[list[str], list[torch.Tensor]]] = {}
    parts = zip(_first(optimizer, _PARAMS), _first(optimizer, _FLATS), strict=True)
    for i, (params, part) in enumerate(parts):
        found = groups.setdefault(i if of_part is None else of_part[i], ([], []))
        found[0].extend(names[id(param)] for param in params)
        found[1].append(part)
    for number, (members, flats) in groups.items():
        yield number, members, flats
