"""Tensor paths as a tree of names, in arrays: what the ranks that show the same paths share."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from tenplexfs.errors import InvalidError

__all__ = ["NODE_LIMIT", "PathTree"]

NODE_LIMIT = 1 << 20


class PathTree:
    """Tensor paths as directories and ``.npy`` files; nodes by breadth, so that children lie side by side.

    Attributes:
        names: Of each node, UTF-8; node 0 is the root, children are in the order of their names.
        paths: The tensor path of each file, None for directories.
        first, count: The children of a node are ``first[n]`` up to ``first[n] + count[n]``.
        subdirs: How many of them are directories.

    >>> tree = PathTree(["layers/0/w", "layers/0/b", "norm"])
    >>> tree.names
    [b'', b'layers', b'norm.npy', b'0', b'b.npy', b'w.npy']
    >>> tree.child(tree.child(0, b"layers"), b"0")
    3
    """

    __slots__ = ("count", "first", "names", "paths", "subdirs")

    def __init__(self, paths: Sequence[str]) -> None:
        self.names: list[bytes] = [b""]
        self.paths: list[str | None] = [None]
        self.first = array("l", [0])
        self.count = array("l", [0])
        self.subdirs = array("l", [0])
        queue = deque([(0, _nested(paths))])
        while queue:
            node, children = queue.popleft()
            self.first[node] = len(self.names)
            self.count[node] = len(children)
            for name, child in sorted((name.encode(), child) for name, child in children.items()):
                if not isinstance(child, str):
                    self.subdirs[node] += 1
                    queue.append((len(self.names), child.children))
                self.names.append(name)
                self.paths.append(child if isinstance(child, str) else None)
                self.first.append(0)
                self.count.append(0)
                self.subdirs.append(0)
        if len(self.names) > NODE_LIMIT:
            raise InvalidError(f"tree: {len(self.names)} entries, need at most {NODE_LIMIT} a rank")

    def child(self, node: int, name: bytes) -> int:
        """Returns the child of ``node`` called ``name``, or 0."""
        first = self.first[node]
        end = first + self.count[node]
        at = bisect_left(self.names, name, first, end)
        return at if at < end and self.names[at] == name else 0


class _Directory:
    """Children by name while a `PathTree` is built: a tensor path, or a directory."""

    __slots__ = ("children",)

    def __init__(self) -> None:
        self.children: dict[str, str | _Directory] = {}


def _nested(paths: Sequence[str]) -> dict[str, str | _Directory]:
    root = _Directory()
    for path in paths:
        directory = root
        *parents, last = path.split("/")
        for part in parents:
            child = directory.children.setdefault(part, _Directory())
            if isinstance(child, str):
                raise InvalidError(f"tensor {path!r}: {part!r} is the file of tensor {child!r} already")
            directory = child
        if last + ".npy" in directory.children:
            raise InvalidError(f"tensor {path!r}: its file is a directory, or another tensor, already")
        directory.children[last + ".npy"] = path
    return root.children
