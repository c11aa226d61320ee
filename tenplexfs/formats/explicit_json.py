"""The explicit form of a layout in JSON: nested objects, a leaf for each shard. And what both forms share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from tenplexfs.core.layout import ExplicitShard
from tenplexfs.core.region import Region
from tenplexfs.errors import InvalidError

__all__ = ["as_path", "convert", "leaf_json", "read_leaves"]

_Struct = TypeVar("_Struct")
_Size = Annotated[int, msgspec.Meta(ge=-(1 << 48), le=1 << 48)]  # below 0 the core has clearer words


class _Box(msgspec.Struct, forbid_unknown_fields=True):
    start: list[_Size]
    stop: list[_Size]


class _Piece(msgspec.Struct, forbid_unknown_fields=True):
    start: list[_Size]
    stop: list[_Size]
    at: list[_Size]


class _Leaf(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    tensor: list[_Size]
    dtype: str | None = None
    pieces: list[_Piece] | None = None
    padding: list[_Box] = []


def convert(what: str, raw: object, kind: type[_Struct]) -> _Struct:
    """Returns ``raw`` as a struct; whatever does not fit is an `InvalidError` that begins with ``what``."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise InvalidError(f"{what}: {error}".replace(" - at `$.", " at `").replace("`", "'")) from None
    except UnicodeEncodeError as error:  # JSON can say half of a surrogate pair
        half = error.object[error.start : error.end]
        raise InvalidError(f"{what}: half a surrogate pair is no text: {half!r}") from None


def as_path(text: str) -> str:
    """Returns a tensor path as layouts may write it, with dots, as it is."""
    return text.replace(".", "/")


def read_leaves(
    what: str, tree: Mapping[str, Any], dtypes: Mapping[str, str]
) -> Iterator[tuple[str, ExplicitShard]]:
    """Yields path and shard of every leaf of one rank.

    Raises:
        InvalidError: Something is no leaf and no object, or a leaf does not fit; begins with ``what``.
    """
    stack: list[tuple[str, Any]] = [("", tree)]
    while stack:
        path, node = stack.pop()
        if not isinstance(node, dict):
            raise InvalidError(f"{what}: {path or 'the rank'}: need an object, got {type(node).__name__}")
        if isinstance(node.get("tensor"), list):
            leaf = convert(f"{what}: {path}", node, _Leaf)
            yield path, _explicit(f"{what}: {path}", leaf, dtypes.get(path))
            continue
        stack += [(f"{path}/{as_path(key)}" if path else as_path(key), child) for key, child in node.items()]


def _explicit(what: str, leaf: _Leaf, dtype: str | None) -> ExplicitShard:
    pieces = None
    try:
        if leaf.pieces is not None:
            pieces = tuple((Region(tuple(p.start), tuple(p.stop)), tuple(p.at)) for p in leaf.pieces)
        padding = tuple(Region(tuple(p.start), tuple(p.stop)) for p in leaf.padding)
    except InvalidError as error:
        raise InvalidError(f"{what}: {error}") from None
    return ExplicitShard(tuple(leaf.tensor), leaf.dtype if leaf.dtype is not None else dtype, pieces, padding)


def leaf_json(shard: ExplicitShard) -> Any:  # noqa: ANN401 - JSON
    """Returns the leaf that says ``shard``."""
    pieces = None
    if shard.pieces is not None:
        pieces = [_Piece(list(region.start), list(region.stop), list(at)) for region, at in shard.pieces]
    padding = [_Box(list(region.start), list(region.stop)) for region in shard.padding]
    return msgspec.to_builtins(_Leaf(list(shard.local_shape), shard.dtype, pieces, padding))
