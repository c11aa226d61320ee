"""The tree of one snapshot: names, inode numbers and attributes, computed and never changed.

An inode number is ``slot (24 bits) | section (3) | rank (17) | node (20)``. The slot numbers publications and
is never reused while the daemon runs, so that no inode is shared by two snapshots: the kernel then switches
everything below ``<job>`` with that one name. The node is an index into a `PathTree`, and ranks that show the
same paths share one: memory grows with the distinct sets of paths, not with the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from tenplexfs.core.region import Region
from tenplexfs.errors import CorruptError, InvalidError, StaleError
from tenplexfs.formats.npy import file_size
from tenplexfs.runtime.joined import JoinedFiles
from tenplexfs.runtime.path_tree import PathTree
from tenplexfs.runtime.protocols import FileContent, SnapshotView

if TYPE_CHECKING:
    from tenplexfs.core.ptc import PTC

__all__ = ["RANK_LIMIT", "SLOT_SHIFT", "Attributes", "BytesContent", "PathTree", "SnapshotTree", "Tree"]

SLOT_SHIFT = 40
_SECTION_SHIFT = 37
_RANK_SHIFT = 20
_NODE_MASK = (1 << _RANK_SHIFT) - 1
_RANK_MASK = (1 << (_SECTION_SHIFT - _RANK_SHIFT)) - 1

_NO_LEAVES: Mapping[str, bytes] = MappingProxyType({})

RANK_LIMIT = _RANK_MASK + 1

# Sections: which part of the tree a node is in.
_TOP, _PTC, _MODEL, _FULL = range(4)
# Nodes of the section _TOP. `full` and `model/<rank>` are node 0 of their own sections.
_ROOT, _JOB_JSON, _LAYOUT_JSON, _PTC_DIR, _MODEL_DIR, _JOINED_FULL = range(6)
_DOCUMENTS = {_JOB_JSON: "job.json", _LAYOUT_JSON: "layout.json"}
# Node of the section _PTC, with a rank: `model/<rank>.safetensors`. Node 0 is `ptc/<rank>.json`.
_JOINED = 1
_SUFFIX = b".safetensors"
_JOINED_FULL_NAME = b"model" + _SUFFIX
_NO_JOINED = b"user.tenplexfs.no_safetensors"


class Attributes(NamedTuple):
    """What stat answers of an entry.

    Attributes:
        ino: Inode number.
        is_dir: A directory, else a regular file.
        size: Bytes that can be read; 0 for directories.
        nlink: Links: 1 for a file, 2 + subdirectories for a directory.
        mtime_ns: When it came to be.
    """

    ino: int
    is_dir: bool
    size: int
    nlink: int
    mtime_ns: int


class Tree(Protocol):
    """A part of the mount that owns all inodes of one slot. No method waits or does I/O.

    `lookup`, `attributes`, `entries` and `open` may raise `UncomputedError`.
    """

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        """Returns the entry ``name`` of the directory ``parent``, or None."""
        ...

    def attributes(self, ino: int) -> Attributes:
        """Returns the attributes of ``ino``, which this tree gave out."""
        ...

    def entries(self, ino: int, start: int) -> Iterator[tuple[bytes, Attributes, int]]:
        """Yields the entries of a directory after the position ``start``: name, attributes, own position."""
        ...

    def xattrs(self, ino: int) -> Mapping[bytes, bytes]:
        """Returns the extended attributes of ``ino`` by name."""
        ...

    def open(self, ino: int) -> FileContent:
        """Opens the file ``ino``."""
        ...


class BytesContent:
    """An open file whose bytes are at hand."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._view = memoryview(data)

    def read(self, offset: int, size: int) -> memoryview:
        """Returns up to ``size`` bytes at ``offset``."""
        return self._view[offset : offset + size]

    async def read_wait(self, offset: int, size: int) -> memoryview:
        """Returns the same as `read`."""
        return self.read(offset, size)

    def close(self) -> None:
        """Holds nothing."""


@runtime_checkable
class HasParts(Protocol):
    """A view that has directories of its own beside those of the state."""

    def parts(self, base: Callable[[int], int]) -> Mapping[int, tuple[bytes, Tree]]:
        """Returns them by section (5 to 7), with names; ``base`` gives the inode of a section's node 0."""
        ...


@runtime_checkable
class HasLeaves(Protocol):
    """A view that has leaves that are no tensors."""

    def leaves(self, rank: int) -> Mapping[str, bytes]:
        """Returns path -> bytes of the files of a rank; the same object for ranks that have the same."""
        ...


class SnapshotTree:
    """Everything below ``<job>`` for one snapshot. Built in any thread, then read by one.

    Args:
        slot: Number of the publication, from 1.
        view: Documents and open files of the snapshot.
        ptc: What each rank holds; None while the job has no state, and then only ``job.json`` and
            ``layout.json`` are shown.
        like: A tree whose names are used again where they are the same.
    """

    def __init__(
        self, slot: int, view: SnapshotView, ptc: PTC | None, like: SnapshotTree | None = None
    ) -> None:
        self.slot = slot
        self.root = slot << SLOT_SHIFT
        self._view = view
        self._ptc = ptc
        self._mtime_ns = view.created_ns
        self._full_base = self.root | _FULL << _SECTION_SHIFT
        self._document_bytes: dict[str, int] = {}
        self._ranks: list[PathTree] = []
        self._trees: dict[tuple[tuple[str, ...], tuple[str, ...]], PathTree] = {}
        self._top: list[tuple[bytes, int]] = [
            (b"job.json", self.root | _JOB_JSON),
            (b"layout.json", self.root | _LAYOUT_JSON),
        ]
        self._add_parts()
        if ptc is None:
            return
        if ptc.world_size > RANK_LIMIT:
            raise InvalidError(f"job {view.job}: {ptc.world_size} ranks, need at most {RANK_LIMIT}")
        self._top += [
            (b"ptc", self.root | _PTC_DIR),
            (b"model", self.root | _MODEL_DIR),
            (b"full", self._full_base),
        ]
        known = like._trees if like is not None else {}
        by_id: dict[tuple[int, int], PathTree] = {}
        for rank in range(ptc.world_size):
            paths, leaves = ptc.rank_paths(rank), self._leaves(rank)
            which = id(paths), id(leaves)
            if which not in by_id:
                by_id[which] = self._tree((paths, tuple(leaves)), known)
            self._ranks.append(by_id[which])
        self._full = self._tree((tuple(sorted(ptc.tensors)), ()), known)
        joined = like._joined if like is not None and like._ptc is not None else None
        self._joined: JoinedFiles = JoinedFiles(view, ptc, joined)

    def twin(self, slot: int) -> SnapshotTree:
        """Returns the same tree with inodes of its own, for a second name in the root."""
        other = copy(self)
        other.slot = slot
        other.root = slot << SLOT_SHIFT
        other._full_base = other._moved(self._full_base)
        named = [(name, ino) for name, ino in self._top if ino >> _SECTION_SHIFT & 7 not in self._parts]
        other._top = [(name, other._moved(ino)) for name, ino in named]
        other._add_parts()
        return other

    def _tree(
        self,
        paths: tuple[tuple[str, ...], tuple[str, ...]],
        known: Mapping[tuple[tuple[str, ...], tuple[str, ...]], PathTree],
    ) -> PathTree:
        if paths not in self._trees:
            self._trees[paths] = known.get(paths) or PathTree(*paths)
        return self._trees[paths]

    def _leaves(self, rank: int) -> Mapping[str, bytes]:
        return self._view.leaves(rank) if isinstance(self._view, HasLeaves) else _NO_LEAVES

    def _add_parts(self) -> None:
        self._parts: dict[int, Tree] = {}
        if isinstance(self._view, HasParts):
            for section, (name, part) in self._view.parts(self._part_ino).items():
                self._parts[section] = part
                self._top.append((name, self._part_ino(section)))

    def _part_ino(self, section: int) -> int:
        return self.root | section << _SECTION_SHIFT

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        """Returns the entry ``name`` of the directory ``parent``, or None."""
        section = parent >> _SECTION_SHIFT & 7
        if (part := self._parts.get(section)) is not None:
            return part.lookup(parent, name)
        if section >= _MODEL:
            tree = self._paths(parent)
            node = tree.child(parent & _NODE_MASK, name)
            if node:
                return self._path_attributes(tree, parent & ~_NODE_MASK, node)
            is_joined = parent == self._full_base and name == _JOINED_FULL_NAME
            return self._joined_attributes(None) if is_joined else None
        node = parent & _NODE_MASK
        if node == _ROOT:
            return next((self.attributes(ino) for entry, ino in self._top if entry == name), None)
        is_model = node == _MODEL_DIR
        is_joined = is_model and name.endswith(_SUFFIX)
        if not is_model and not name.endswith(b".json"):
            return None
        digits = name[: -len(_SUFFIX)] if is_joined else name if is_model else name[:-5]
        # Not only isdigit: "07" and int's other spellings are no names of ranks.
        if not digits.isdigit() or len(digits) > 6 or b"%d" % (rank := int(digits)) != digits:
            return None
        if rank >= len(self._ranks):
            return None
        if is_joined:
            return self._joined_attributes(rank)
        return self.attributes(self._rank_ino(_MODEL if is_model else _PTC, rank))

    def attributes(self, ino: int) -> Attributes:
        """Returns the attributes of ``ino``."""
        section = ino >> _SECTION_SHIFT & 7
        if (part := self._parts.get(section)) is not None:
            return part.attributes(ino)
        if section >= _MODEL:
            return self._path_attributes(self._paths(ino), ino & ~_NODE_MASK, ino & _NODE_MASK)
        name = self._document_name(ino)
        if name is not None:
            size = self._document_bytes.get(name)
            if size is None:
                size = self._document_bytes[name] = len(self._view.document(name))
            return Attributes(ino, False, size, 1, self._mtime_ns)
        node = ino & _NODE_MASK
        if self._is_joined(ino):
            size = self._joined.size(self._joined_rank(ino)) or 0
            return Attributes(ino, False, size, 1, self._mtime_ns)
        subdirs = 0
        if node == _MODEL_DIR:
            subdirs = len(self._ranks)
        elif node == _ROOT:
            subdirs = len(self._parts) + (3 if self._ptc is not None else 0)
        return Attributes(ino, True, 0, 2 + subdirs, self._mtime_ns)

    def entries(self, ino: int, start: int) -> Iterator[tuple[bytes, Attributes, int]]:
        """Yields the entries of a directory after the position ``start``: name, attributes, own position."""
        section = ino >> _SECTION_SHIFT & 7
        node = ino & _NODE_MASK
        if (part := self._parts.get(section)) is not None:
            yield from part.entries(ino, start)
        elif section >= _MODEL:
            tree = self._paths(ino)
            base = ino & ~_NODE_MASK
            names = tree.names
            first = tree.first[node]
            for child in range(first + start, first + tree.count[node]):
                yield names[child], self._path_attributes(tree, base, child), child - first + 1
            end = tree.count[node]
            if ino == self._full_base and start <= end and (joined := self._joined_attributes(None)):
                yield _JOINED_FULL_NAME, joined, end + 1
        elif node == _ROOT:
            for at in range(start, len(self._top)):
                yield self._top[at][0], self.attributes(self._top[at][1]), at + 1
        else:
            is_model = node == _MODEL_DIR
            form = b"%d" if is_model else b"%d.json"
            for rank in range(start, len(self._ranks)):
                entry = self.attributes(self._rank_ino(_MODEL if is_model else _PTC, rank))
                yield form % rank, entry, rank + 1
            count = len(self._ranks)
            for rank in range(max(start - count, 0), count if is_model else 0):
                if joined := self._joined_attributes(rank):
                    yield b"%d" % rank + _SUFFIX, joined, count + rank + 1

    def xattrs(self, ino: int) -> Mapping[bytes, bytes]:
        """Returns dtype, global shape and pieces of a tensor's file, by name; of other entries nothing."""
        section = ino >> _SECTION_SHIFT & 7
        if (part := self._parts.get(section)) is not None:
            return part.xattrs(ino)
        if section < _MODEL or self._ptc is None:
            return {}
        path = self._paths(ino).paths[ino & _NODE_MASK]
        if path is None:
            if ino & _NODE_MASK in self._paths(ino).leaves:
                return {}
            is_top = not ino & _NODE_MASK
            reason = self._joined.reason(None if section == _FULL else self._rank(ino)) if is_top else None
            return {_NO_JOINED: reason.encode()} if reason is not None else {}
        tensor = self._ptc.tensors[path]
        if section == _MODEL:
            pieces = [(piece.region, piece.at) for piece in self._ptc.shard(self._rank(ino), path).pieces]
        else:
            origin = (0,) * len(tensor.shape)
            pieces = [(Region(origin, tensor.shape), origin)]
        described = [{"start": region.start, "stop": region.stop, "at": at} for region, at in pieces]
        return {
            b"user.tenplexfs.dtype": tensor.dtype.encode(),
            b"user.tenplexfs.global_shape": json.dumps(tensor.shape).encode(),
            b"user.tenplexfs.pieces": json.dumps(described).encode(),
        }

    def open(self, ino: int) -> FileContent:
        """Opens the file ``ino``.

        Raises:
            CorruptError: What the view opened has not the size that stat gives.
        """
        if (part := self._parts.get(ino >> _SECTION_SHIFT & 7)) is not None:
            return part.open(ino)
        name = self._document_name(ino)
        if name is not None:
            content: FileContent = BytesContent(self._view.document(name))
        elif self._is_joined(ino):
            name = "safetensors"
            content = self._joined.open(self._joined_rank(ino))
        else:
            tree, node = self._paths(ino), ino & _NODE_MASK
            name = tree.paths[node]
            if (leaf := tree.leaves.get(node)) is not None:
                return BytesContent(self._leaves(self._rank(ino))[leaf])
            if name is None:
                raise StaleError(f"inode {ino}: a directory, not a file")
            if ino >> _SECTION_SHIFT & 7 == _MODEL:
                content = self._view.open_shard(self._rank(ino), name)
            else:
                content = self._view.open_full(name)
        expected = self.attributes(ino).size
        if content.size != expected:
            content.close()
            raise CorruptError(f"{name} of job {self._view.job}: {content.size} bytes, stat says {expected}")
        return content

    def _moved(self, ino: int) -> int:
        return self.root | ino & ((1 << SLOT_SHIFT) - 1)

    def _rank_ino(self, section: int, rank: int) -> int:
        return self.root | section << _SECTION_SHIFT | rank << _RANK_SHIFT

    def _paths(self, ino: int) -> PathTree:
        if ino >> _SECTION_SHIFT & 7 == _MODEL:
            return self._ranks[self._rank(ino)]
        return self._full

    def _rank(self, ino: int) -> int:
        return ino >> _RANK_SHIFT & _RANK_MASK

    def _is_joined(self, ino: int) -> bool:
        section, node = ino >> _SECTION_SHIFT & 7, ino & _NODE_MASK
        return (section, node) in ((_PTC, _JOINED), (_TOP, _JOINED_FULL))

    def _joined_rank(self, ino: int) -> int | None:
        return None if ino & _NODE_MASK == _JOINED_FULL else self._rank(ino)

    def _joined_attributes(self, rank: int | None) -> Attributes | None:
        """Attributes of the safetensors file of a rank, or of the whole model; None where there is none."""
        ino = self.root | _JOINED_FULL if rank is None else self._rank_ino(_PTC, rank) | _JOINED
        return None if self._joined.size(rank) is None else self.attributes(ino)

    def _document_name(self, ino: int) -> str | None:
        section = ino >> _SECTION_SHIFT & 7
        if section == _PTC and not ino & _NODE_MASK:
            return f"ptc/{self._rank(ino)}.json"
        return _DOCUMENTS.get(ino & _NODE_MASK) if section == _TOP else None

    def _path_attributes(self, tree: PathTree, base: int, node: int) -> Attributes:
        path = tree.paths[node]
        if (leaf := tree.leaves.get(node)) is not None:
            size = len(self._leaves(self._rank(base))[leaf])
            return Attributes(base | node, False, size, 1, self._mtime_ns)
        if path is None:
            return Attributes(base | node, True, 0, 2 + tree.subdirs[node], self._mtime_ns)
        ptc = self._ptc
        assert ptc is not None  # a node of a path exists only with a PTC
        tensor = ptc.tensors[path]
        if base == self._full_base:
            shape = tensor.shape
        else:
            shape = ptc.shard(base >> _RANK_SHIFT & _RANK_MASK, path).local_shape
        return Attributes(base | node, False, file_size(shape, tensor.dtype), 1, self._mtime_ns)
