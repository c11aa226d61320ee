"""Carries plans out on arrays of flat indices, and counts by sets of elements what no plan could save."""

import itertools

import numpy as np

from tenplexfs.core.node_part import node_part


def put(target, target_boxes, source, source_boxes):
    for t, s in zip(target_boxes.tolist(), source_boxes.tolist(), strict=True):
        into = tuple(slice(a, b) for a, b in zip(*t, strict=True))
        value = source[tuple(slice(a, b) for a, b in zip(*s, strict=True))]
        target[into] = value.reshape(target[into].shape)


def carry_out(made, old):
    """Returns the new arrays, rank by rank, and the bytes that crossed to each node; checks each row."""
    new_arrays, wire_bytes = {}, {}
    for node in made.nodes:
        part = node_part(made, node)
        arrays = [np.full(t.shard.local_shape, -1) for t in part.targets]
        crossed = {}
        for array, target in zip(arrays, part.targets, strict=True):
            written = np.zeros(array.shape, int)
            item = made.new.tensors[target.path].itemsize
            for moves in target.moves:
                rank, path = moves.source
                source = old[rank][path]
                assert made.old.node_of(rank) == moves.node
                assert (moves.way in ("kept", "local")) == (moves.node == node)
                put(array, moves.target_boxes, source, moves.source_boxes)
                for box in moves.target_boxes.tolist():
                    written[tuple(slice(a, b) for a, b in zip(*box, strict=True))] += 1
                if moves.way == "wire":
                    ids = [
                        source[tuple(slice(a, b) for a, b in zip(*box, strict=True))].ravel().tolist()
                        for box in moves.source_boxes.tolist()
                    ]
                    for element in itertools.chain(*ids):
                        assert (target.path, element) not in crossed, "sent twice"
                        crossed[target.path, element] = item
            assert ((written == 1) | (array == -1)).all()
            if target.kept_from is not None:
                rank, path = target.kept_from
                assert made.old.node_of(rank) == node
                assert np.array_equal(old[rank][path], array)
        for array, target in zip(arrays, part.targets, strict=True):
            again = array.copy()
            for copies in target.copies:
                put(again, copies.target_boxes, arrays[copies.target], copies.source_boxes)
            assert np.array_equal(again, array)
            for rank, path in target.keys:
                new_arrays.setdefault(rank, {})[path] = array
        wire_bytes[node] = sum(crossed.values())
    return new_arrays, wire_bytes


def pass_on(made, new):
    """Follows every element that crosses to where it really comes from; returns who sends how many bytes.

    Checks that what comes through another node is what that node has in its new arrays, that it has it sent
    itself, and that no two nodes wait for each other.
    """
    matrix = np.zeros((len(made.nodes),) * 2, np.int64)
    came_from = {}  # (node, tensor, element) -> the node that sent it, None where it had the old bytes
    for column, node in enumerate(made.nodes):
        for target in node_part(made, node).targets:
            item = made.new.tensors[target.path].itemsize
            array = new[target.keys[0][0]][target.keys[0][1]]
            for moves in target.moves:
                if moves.way != "wire":
                    assert moves.via is None
                    continue
                elements = np.concatenate([array[box_of(b)].ravel() for b in moves.target_boxes])
                sender = made.nodes.index(moves.via.node if moves.via else moves.node)
                matrix[sender, column] += len(elements) * item
                for element in elements.tolist():
                    key = (column, target.path, element)
                    assert key not in came_from, "sent twice"
                    came_from[key] = sender if moves.via else None
                if (via := moves.via) is None:
                    continue
                rank, path = via.source
                assert made.new.node_of(rank) == via.node != node
                again = array.copy()
                for target_box in via.target_boxes:
                    again[box_of(target_box)] = -2
                assert (again == -2).sum() == len(elements)
                put(again, via.target_boxes, new[rank][path], via.source_boxes)
                assert np.array_equal(again, array)
    for (_, path, element), sender in came_from.items():
        seen = set()
        while sender is not None:
            assert sender not in seen, "a circle"
            seen.add(sender)
            sender = came_from[sender, path, element]
    return matrix


def box_of(box):
    return tuple(slice(int(a), int(b)) for a, b in zip(*box, strict=True))


def lower_bound(made, old, new):
    """Computes what each node needs and does not have, as sets of elements."""
    total = {}
    for node in made.nodes:
        need, have = {}, {}
        for ranks, arrays, into in ((made.new.nodes, new, need), (made.old.nodes, old, have)):
            for rank in ranks.get(node, ()):
                for path, array in arrays[rank].items():
                    into.setdefault("v" if path == "tied" else path, set()).update(
                        array[array >= 0].ravel().tolist()
                    )
        total[node] = sum(
            len(elements - have.get(path, set())) * made.new.tensors[path].itemsize
            for path, elements in need.items()
        )
    return total
