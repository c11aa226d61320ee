"""The tensors of ResNet-50, by the names and shapes of torchvision's."""

from __future__ import annotations

__all__ = ["resnet50_tensors"]

_BLOCKS = (3, 4, 6, 3)
_EXPANSION = 4


def resnet50_tensors() -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns path -> (shape, dtype), the statistics of the batch norms included.

    Source: "Deep Residual Learning" (arXiv 1512.03385, table 1).
    """
    found: dict[str, tuple[tuple[int, ...], str]] = {}

    def convolution(key: str, out: int, into: int, size: int) -> None:
        found[f"{key}/weight"] = ((out, into, size, size), "float32")

    def norm(key: str, width: int) -> None:
        for leaf in ("weight", "bias", "running_mean", "running_var"):
            found[f"{key}/{leaf}"] = ((width,), "float32")
        found[f"{key}/num_batches_tracked"] = ((), "int64")

    convolution("conv1", 64, 3, 7)
    norm("bn1", 64)
    into = 64
    for stage, blocks in enumerate(_BLOCKS):
        width = 64 << stage
        out = width * _EXPANSION
        for block in range(blocks):
            key = f"layer{stage + 1}/{block}"
            sizes = ((width, into, 1), (width, width, 3), (out, width, 1))
            for number, (rows, columns, size) in enumerate(sizes, 1):
                convolution(f"{key}/conv{number}", rows, columns, size)
                norm(f"{key}/bn{number}", rows)
            if block == 0:
                convolution(f"{key}/downsample/0", out, into, 1)
                norm(f"{key}/downsample/1", out)
            into = out
    found["fc/weight"] = ((1000, into), "float32")
    found["fc/bias"] = ((1000,), "float32")
    return found
