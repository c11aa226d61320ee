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
    """Paths as directories and files; nodes by breadth, so that children lie side by side.

    Tensors are ``.npy`` files, other leaves ``.json`` files.

    Attributes:
        names: Of each node, UTF-8; node 0 is the root, children are in the order of their names.
        paths: The tensor path of each file, None for directories and other leaves.
        leaves: The path of each node that is another leaf.
        first, count: The children of a node are ``first[n]`` up to ``first[n] + count[n]``.
        subdirs: How many of them are directories.

    >>> tree = PathTree(["layers/0/w", "layers/0/b", "norm"])
    >>> tree.names
    [b'', b'layers', b'norm.npy', b'0', b'b.npy', b'w.npy']
    >>> tree.child(tree.child(0, b"layers"), b"0")
    3
    """

    __slots__ = ("count", "first", "leaves", "names", "paths", "subdirs")

    def __init__(self, paths: Sequence[str], leaves: Sequence[str] = ()) -> None:
        self.names: list[bytes] = [b""]
        self.paths: list[str | None] = [None]
        self.first = array("l", [0])
        self.count = array("l", [0])
        self.subdirs = array("l", [0])
        self.leaves: dict[int, str] = {}
        queue = deque([(0, _nested(paths, leaves))])
        while queue:
            node, children = queue.popleft()
            self.first[node] = len(self.names)
            self.count[node] = len(children)
            for name, child in sorted((name.encode(), child) for name, child in children.items()):
                if isinstance(child, _Directory):
                    self.subdirs[node] += 1
                    queue.append((len(self.names), child.children))
                elif isinstance(child, _Leaf):
                    self.leaves[len(self.names)] = child.path
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
    """Children by name while a `PathTree` is built: a tensor path, another leaf, or a directory."""

    __slots__ = ("children",)

    def __init__(self) -> None:
        self.children: dict[str, str | _Leaf | _Directory] = {}


class _Leaf:
    """A leaf that is no tensor."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path


def _nested(paths: Sequence[str], leaves: Sequence[str]) -> dict[str, str | _Leaf | _Directory]:
    root = _Directory()
    files: list[tuple[str, str, str | _Leaf]] = [(path, ".npy", path) for path in paths]
    files += [(path, ".json", _Leaf(path)) for path in leaves]
    for path, suffix, file in files:
        directory = root
        *parents, last = path.split("/")
        for part in parents:
            child = directory.children.setdefault(part, _Directory())
            if not isinstance(child, _Directory):
                raise InvalidError(f"tensor {path!r}: {part!r} is a file already")
            directory = child
        if last + suffix in directory.children:
            raise InvalidError(f"tensor {path!r}: its file is a directory, or another tensor, already")
        directory.children[last + suffix] = file
    return root.children
