"""What a rank holds, as the flat indices of the whole tensor: what every framework can be compared by."""

import numpy as np

from tenplexfs.core.build import build_ptc
from tenplexfs.formats.layout_json import layout_text, parse_layout


def ptc_of(layout):
    """Builds the layout as it comes back from its JSON, which must say the same."""
    text = layout_text(layout)
    again = parse_layout(text)
    assert layout_text(again) == text
    return build_ptc(again)


def indices(shape):
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)


def held(ptc, rank, path):
    """Returns the local array of the flat indices of the tensor, -1 for padding."""
    whole = indices(ptc.tensors[path].shape)
    shard = ptc.shard(rank, path)
    local = np.full(shard.local_shape, -1)
    for piece in shard.pieces:
        source = whole[piece.region.as_slices()]
        if shard.flat:
            local[piece.at[0] : piece.at[0] + source.size] = source.ravel()
        else:
            local[tuple(slice(a, a + n) for a, n in zip(piece.at, source.shape, strict=True))] = source
    return local
