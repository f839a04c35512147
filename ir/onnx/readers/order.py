"""Selects the nodes that the outputs of a file depend on, and sorts them topologically."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from ir.errors import refuse
from ir.onnx.readers.nodes import Node


def needed(nodes: list[Node], outputs: Iterable[str]) -> list[Node]:
    """The nodes on which at least one output depends, in the same order."""
    producer = {name: i for i, node in enumerate(nodes) for name in node.outputs if name}
    pending = [producer[name] for name in outputs if name in producer]
    found = set[int]()
    while pending:
        index = pending.pop()
        if index not in found:
            found.add(index)
            pending += (producer[name] for name in nodes[index].inputs if name in producer)
    return [node for i, node in enumerate(nodes) if i in found]


def in_order(nodes: list[Node], known: set[str]) -> list[Node]:
    """The nodes in topological order (Kahn's algorithm); ties are resolved by position in the file.

    Raises:
        ModelError: the graph has a cycle.
    """
    producer = {name: i for i, node in enumerate(nodes) for name in node.outputs if name}
    if _is_in_order(nodes, producer.keys() - known):
        return list(nodes)
    waiting = [0] * len(nodes)
    readers: list[list[int]] = [[] for _ in nodes]
    for i, node in enumerate(nodes):
        for name in {n for n in node.inputs if n and n in producer and n not in known}:
            waiting[i] += 1
            readers[producer[name]].append(i)
    ready = [i for i, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(nodes[index])
        for reader in readers[index]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        stuck = next(node for i, node in enumerate(nodes) if waiting[i] > 0)
        repair = "Export again: a forward graph has no cycle."
        raise refuse("the graph has a cycle", stuck.name or stuck.outputs[0] if stuck.outputs else stuck.kind, repair)
    return order


def _is_in_order(nodes: list[Node], written: set[str]) -> bool:
    """Whether the nodes are in topological order already, as in most files."""
    if sum(len(node.outputs) for node in nodes) != sum(len(set(node.outputs)) for node in nodes):
        return False
    for node in nodes:
        if not written.isdisjoint(node.inputs):
            return False
        written.difference_update(node.outputs)
    return True
