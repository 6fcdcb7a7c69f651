"""Graphs of recorded functions, simplified before they are compiled: nothing is computed twice.

`once` merges equal operations on equal operands. `looked_up` knows one thing more, that a function of single rows
commutes with choosing rows: where a round passes all rows of its clients through a network, and batches of the same
rows through the same network (FedNest at a fixed backbone), the batches are looked up in what was computed of all rows.

`in_one_product` knows what clients share: where they all have one matrix, as at the first local step from a common
model, one product of all their rows takes the place of one small product per client.

All are exact: the rewritten graph does the same operations on the same numbers, only fewer times. Products of fewer or
more rows may be rounded differently.
"""

from typing import Any, NamedTuple

import torch

aten = torch.ops.aten
_NOTHING = {aten.detach.default, aten.alias.default}
_SHAPING = {aten.view.default, aten.expand.default, aten._unsafe_view.default}


def once(graph: Any) -> None:
    """Do equal operations on equal operands once; none of them may write in place.

    Args:
        graph: a graph of torch.fx with the values of its nodes, changed in place.
    """
    seen: dict[str, Any] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        same_shape = node.target in _SHAPING and node.meta["val"].shape == node.args[0].meta["val"].shape
        if node.target in _NOTHING or same_shape:
            other = node.args[0]
        else:
            other = seen.setdefault(f"{node.target} {node.args} {node.kwargs}", node)  # operands are there by name
        if other is not node:
            node.replace_all_uses_with(other)
            graph.erase_node(node)
    graph.eliminate_dead_code()


class _Twin(NamedTuple):
    """What a node is of some rows: the node that is the same of all rows [K, n, …], and which of them [K, b]."""

    whole: Any
    rows: Any
    product: bool  # whether looking it up saves a product


def looked_up(graph: Any) -> None:
    """Look rows up in what is computed of all rows anyway, instead of computing it of them again.

    Batches of rows are recognised where their numbers are chosen from all numbers: `embedding(table, gather(all, 1,
    rows))`, beside `embedding(table, all)`.

    Args:
        graph: a graph of torch.fx with the values of its nodes, changed in place.
    """
    twins: dict[Any, _Twin] = {}
    earlier: set[Any] = set()
    for node in graph.nodes:
        if node.op == "call_function" and (twin := _twin(node, twins, earlier)) is not None:
            twins[node] = twin
        earlier.add(node)
    for node, (whole, rows, product) in twins.items():
        if product and any(user not in twins for user in node.users):
            with graph.inserting_before(node):
                clients = graph.call_function(aten.arange.default, (len(rows.meta["val"]),))
                clients = graph.call_function(aten.unsqueeze.default, (clients, 1))
                found = graph.call_function(aten.index.Tensor, (whole, [clients, rows]))
            found.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(found)
    graph.eliminate_dead_code()
    _unchosen(graph)


def _twin(node: Any, twins: dict[Any, _Twin], earlier: set[Any]) -> _Twin | None:
    """The same of all rows, where it is computed earlier."""
    if node.target is aten.embedding.default:
        table, numbers = node.args[:2]
        if numbers.target is not aten.gather.default or numbers.args[1] != 1 or len(numbers.meta["val"].shape) != 2:
            return None
        whole, rows = numbers.args[0], numbers.args[2]
        same = (user for user in table.users if user.target is node.target and user.args[:2] == (table, whole))
        return next((_Twin(user, rows, False) for user in same if user in earlier), None)
    operands = [arg for arg in node.args if isinstance(arg, torch.fx.Node)]
    known = [arg for arg in operands if arg in twins]
    if len(known) != 1 or not _by_row(node, known[0]):
        return None
    of, (whole, rows, product) = known[0], twins[known[0]]
    if node.target in _SHAPING:
        shape = [*whole.meta["val"].shape[:2], *node.meta["val"].shape[2:]]
        same = (user for user in whole.users if user.target in _SHAPING and list(user.meta["val"].shape) == shape)
    else:
        wanted = tuple(whole if arg is of else arg for arg in node.args), node.kwargs
        same = (user for user in whole.users if user.target is node.target and (user.args, user.kwargs) == wanted)
    product = product or node.target is aten.bmm.default
    return next((_Twin(user, rows, product) for user in same if user in earlier), None)


def _by_row(node: Any, of: Any) -> bool:
    """Whether each row [k, i] of a node's value depends on the row [k, i] of one operand alone, and not on i."""
    shape, before = node.meta["val"].shape, of.meta["val"].shape
    if len(shape) < 3 or shape[:2] != before[:2]:
        return False
    if node.target in _SHAPING:
        return shape.numel() == before.numel()
    if node.target is aten.bmm.default:
        return node.args[0] is of
    others = [arg.meta["val"].shape for arg in node.args if isinstance(arg, torch.fx.Node) and arg is not of]
    alike = all(len(other) < len(shape) - 1 or other[1 - len(shape)] == 1 for other in others)
    return torch.Tag.pointwise in node.target.tags and len(before) == len(shape) and alike


def _unchosen(graph: Any) -> None:
    """Choose from consecutive numbers by adding: (first + 0 … n − 1)[rows] is first + rows."""
    for node in list(graph.nodes):
        if node.target is aten.gather.default and node.args[1] == 1:
            numbers, _, rows = node.args[:3]
            if numbers.target is aten.add.Tensor and _counts(numbers.args[1]) and numbers.args[0] is not rows:
                with graph.inserting_before(node):
                    added = graph.call_function(aten.add.Tensor, (numbers.args[0], rows))
                added.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(added)
    graph.eliminate_dead_code()


def in_one_product(graph: Any) -> None:
    """One product of all clients' rows where their products have one matrix in common.

    Args:
        graph: a graph of torch.fx with the values of its nodes, changed in place.
    """
    for node in list(graph.nodes):
        if node.target is not aten.bmm.default:
            continue
        left, right = node.args
        with graph.inserting_before(node):
            if _is_shared(right) and _is_stacked(left):
                found = _of_all(graph, left, _added(graph, aten.select.int, right, 0, 0))
            elif _is_shared(left) and _is_transposed(right) and _is_stacked(right.args[0]):
                matrix = _added(graph, aten.t.default, _added(graph, aten.select.int, left, 0, 0))
                found = _added(graph, aten.permute.default, _of_all(graph, right.args[0], matrix), [0, 2, 1])
            else:
                continue
        node.replace_all_uses_with(found)
    graph.eliminate_dead_code()


def _of_all(graph: Any, rows: Any, matrix: Any) -> Any:
    """Rows [K, n, d] times a matrix [d, m]: [K, n, m]."""
    clients, count, length = rows.meta["val"].shape
    product = _added(graph, aten.mm.default, _added(graph, aten.view.default, rows, [clients * count, length]), matrix)
    return _added(graph, aten.view.default, product, [clients, count, matrix.meta["val"].shape[1]])


def _added(graph: Any, op: Any, *args: Any) -> Any:
    """One more operation, with its value."""
    node = graph.call_function(op, args)
    node.meta["val"] = op(*(arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in args))
    return node


def _is_shared(node: Any) -> bool:
    """Whether all clients have one matrix: it is stored once."""
    value = node.meta["val"]
    return len(value) > 1 and value.stride(0) == 0


def _is_stacked(node: Any) -> bool:
    return bool(node.meta["val"].is_contiguous())


def _is_transposed(node: Any) -> bool:
    if node.target is aten.transpose.int:
        return {axis % 3 for axis in node.args[1:]} == {1, 2}
    return bool(node.target is aten.permute.default and list(node.args[1]) == [0, 2, 1])


def _counts(node: Any) -> bool:
    """Whether a node is 0 … n − 1."""
    if getattr(node, "target", None) is aten.arange.default:
        return True
    return getattr(node, "target", None) is aten.arange.start and node.args[0] == 0


__all__ = ["in_one_product", "looked_up", "once"]
