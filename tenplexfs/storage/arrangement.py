"""Where the arrays of a rank lie in its files: found once for a state, used for each of its saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tenplexfs.core.region import Region
from tenplexfs.formats import npy
from tenplexfs.storage.ingest import Key, Wanted, lay_out
from tenplexfs.storage.sums import piece_boxes

if TYPE_CHECKING:
    from tenplexfs.core.ptc import Shard

__all__ = ["Arrangement", "Slot", "arrange"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A local array in a file.

    Attributes:
        keys: Under which it is stored.
        file: Number of the file.
        offset: Where the header begins in it.
        header: What stands before the data.
        nbytes, shape, dtype: Of the data.
        boxes: Where each piece lies, as `sums.box_sums` takes it.
        padding: Boxes of no data, in local coordinates.
        is_whole: It is one piece.
    """

    keys: tuple[Key, ...]
    file: int
    offset: int
    header: bytes
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Region, ...]
    padding: tuple[Region, ...]
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Files of a rank, and what is in them.

    Attributes:
        sizes: Kind and bytes of each file.
        slots: All arrays.
        in_file: File -> the numbers of its slots, in the order of their offsets.
    """

    sizes: tuple[tuple[str, int], ...]
    slots: tuple[Slot, ...]
    in_file: tuple[tuple[int, ...], ...]


def arrange(arrays: Sequence[tuple[tuple[Key, ...], Shard, str]]) -> Arrangement:
    """Returns where arrays go.

    Args:
        arrays: Keys, shard and dtype of each.

    Raises:
        InvalidError: No array can be of that shape and type.

    Cost: About 5 us an array.
    """
    sizes, places = lay_out([Wanted(keys, shard.local_shape, dtype) for keys, shard, dtype in arrays])
    boxes: dict[int, tuple[Region, ...]] = {}
    slots: list[Slot] = []
    in_file: list[list[int]] = [[] for _ in sizes]
    for number, ((keys, shard, dtype), (file, offset)) in enumerate(zip(arrays, places, strict=True)):
        shape = shard.local_shape
        header = npy.header(shape, dtype)
        cut = boxes.get(id(shard))
        if cut is None:
            cut = boxes[id(shard)] = piece_boxes(shard)
        nbytes = npy.file_size(shape, dtype) - len(header)
        whole = not shard.padding and len(cut) == 1
        slots.append(Slot(keys, file, offset, header, nbytes, shape, dtype, cut, shard.padding, whole))
        in_file[file].append(number)
    return Arrangement(tuple(sizes), tuple(slots), tuple(map(tuple, in_file)))
