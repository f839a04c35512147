"""The text of a PipeDream profile: layers with measured times and sizes, and the edges between them.

    node7 -- LSTM(2048, 1024) -- forward_compute_time=3.19, backward_compute_time=5.35,
             activation_size=[6291456.0; 131072.0], parameter_size=50364416.000      (one line)
        node7 -- node8

Times in a file are milliseconds of a whole mini-batch, sizes bytes of 4-byte elements. How layers become operators is
in `ir.profile_import`.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ir.errors import ModelTooExpensive, refuse, too_expensive

MAX_LAYERS = 5_000
"""Largest number of layers of a file; this and the next three bounds are assumed."""
MAX_EDGES = 50_000
"""Largest number of edges between layers."""
MAX_LINE = 4_096
"""Largest number of characters of a line."""
MAX_OUTPUTS = 64
"""Largest number of outputs of a layer."""
SHOWN = 8
"""Largest number of layers of a cycle that a message names."""
ELEMENT_BYTES = 4
"""Bytes of an element: profiles are in float32."""
_LIMITS = {"time": 1e9, "size": float(1 << 48)}

_NODE = re.compile(
    r"node(\d{1,9}) -- (.*) -- forward_compute_time=([^,]*), backward_compute_time=([^,]*), "
    r"activation_size=(\[[^\]]*\]|[^,\[\]]*), parameter_size=([^\s,]*)(?: -- stage_id=\d+)?"
)
_EDGE = re.compile(r"node(\d{1,9}) -- node(\d{1,9})")
FORM = (
    "Write `nodeN -- name -- forward_compute_time=ms, backward_compute_time=ms, activation_size=bytes, "
    "parameter_size=bytes` for each layer and `nodeA -- nodeB` for each edge."
)


@dataclass(slots=True)
class ProfiledLayer:
    """One layer of a profile, with the numbers of those before and after it."""

    number: int
    label: str
    """Text of the layer, such as `LSTM(2048, 1024)`."""
    forward_s: float
    """Seconds of the forward pass of the whole mini-batch."""
    backward_s: float
    """Seconds of the backward pass of the whole mini-batch."""
    sizes: tuple[float, ...]
    """Bytes of the outputs, for the whole mini-batch."""
    parameters: float
    """Bytes of the parameters."""
    line: int
    """Number of the line that states it."""
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)

    @property
    def item(self) -> int | None:
        """k of a `__getitem__(k)` that only picks from a tuple."""
        found = re.fullmatch(r"__getitem__\((\d{1,4})\)", self.label)
        picks = found and len(self.before) == 1 and not self.parameters and not (self.forward_s or self.backward_s)
        return int(found[1]) if found and picks else None


def expensive(message: str, value: object) -> ModelTooExpensive:
    """The error for a profile that is too large, to be raised by the caller."""
    return too_expensive(message, value, "Profile coarser layers, such as whole blocks.")


def parse(text: str) -> dict[int, ProfiledLayer]:
    """The layers of a profile by number, with their edges.

    Raises:
        ModelError: a line is malformed, or layers and edges do not fit each other.
        ModelTooExpensive: there are too many layers or edges.
    """
    if text.count("\n") > MAX_LAYERS + MAX_EDGES:
        raise expensive(f"the profile has more than {MAX_LAYERS + MAX_EDGES} lines", text.count("\n"))
    nodes: dict[int, ProfiledLayer] = {}
    edges: dict[tuple[int, int], int] = {}
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line:
            continue
        if len(line) > MAX_LINE:
            raise refuse(f"line {number} is longer than {MAX_LINE} characters", line, FORM)
        edge = _EDGE.fullmatch(line)
        if edge is not None:
            pair = (int(edge[1]), int(edge[2]))
            if pair in edges:
                raise refuse(f"line {number}: this edge is given twice", line, "Leave one of them out.")
            edges[pair] = number
            continue
        node = _node(line, number)
        if node.number in nodes:
            raise refuse(f"line {number}: node{node.number} is given twice", line, "Number each layer once.")
        nodes[node.number] = node
        if len(nodes) > MAX_LAYERS:
            raise expensive(f"the profile has more than {MAX_LAYERS} layers", len(nodes))
    if len(edges) > MAX_EDGES:
        raise expensive(f"the profile has more than {MAX_EDGES} edges", len(edges))
    for (source, target), number in edges.items():
        for end in (source, target):
            if end not in nodes:
                raise refuse(f"line {number}: node{end} is not there", f"node{source} -- node{target}", FORM)
        nodes[source].after.append(target)
        nodes[target].before.append(source)
    if not any(node.parameters for node in nodes.values()):
        raise refuse("no layer has parameters", f"{len(nodes)} layers", "Profile a model that is trained.")
    _check_connected(nodes)
    return nodes


def _check_connected(nodes: Mapping[int, ProfiledLayer]) -> None:
    """Checks that all layers with parameters are connected by edges.

    Raises:
        ModelError: names the first layer of another part than that of the first one.
    """
    trained = [node for node in nodes.values() if node.parameters]
    reached, waiting = {trained[0].number}, [trained[0]]
    while waiting:
        node = waiting.pop()
        for number in (*node.before, *node.after):
            if number not in reached:
                reached.add(number)
                waiting.append(nodes[number])
    for node in trained:
        if node.number not in reached:
            raise refuse(
                f"line {node.line}: no edge leads from node{node.number} to the part of node{trained[0].number}",
                node.label,
                "Give the edges between them as in `node1 -- node2`, or profile one model.",
            )


def _node(line: str, number: int) -> ProfiledLayer:
    found = _NODE.fullmatch(line)
    if found is None:
        raise refuse(f"line {number} is neither a layer nor an edge", line, FORM)
    sizes = found[5].strip("[]").split(";")
    if len(sizes) > MAX_OUTPUTS:
        raise refuse(f"line {number}: more than {MAX_OUTPUTS} outputs", line, "Profile coarser layers.")
    return ProfiledLayer(
        number=int(found[1]),
        label=found[2].strip(),
        forward_s=1e-3 * _number(found[3], number, "forward_compute_time", "time"),
        backward_s=1e-3 * _number(found[4], number, "backward_compute_time", "time"),
        sizes=tuple(_number(size, number, "activation_size", "size") for size in sizes),
        parameters=_number(found[6], number, "parameter_size", "size"),
        line=number,
    )


def _number(text: str, line: int, what: str, kind: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise refuse(f"line {line}: {what} is not a number", text, "Write milliseconds and bytes.") from None
    if not (math.isfinite(value) and 0.0 <= value <= _LIMITS[kind]):
        raise refuse(f"line {line}: {what} is out of range", text, f"Give 0 to {_LIMITS[kind]:g}.")
    return value


def batch_of_classifier(nodes: Mapping[int, ProfiledLayer]) -> int | None:
    """Samples of the mini-batch by the classifier of a convolutional network, whose output is `[batch, features]`."""
    if not any(node.label.startswith("Conv2d(") for node in nodes.values()):
        return None
    found = set()
    for node in nodes.values():
        features = re.match(r"Linear\(.*out_features=(\d{1,9})\b", node.label)
        if features and int(features[1]):
            found.add(node.sizes[0] / (ELEMENT_BYTES * int(features[1])))
    batch = found.pop() if len(found) == 1 else 0.0
    return int(batch) if batch >= 1 and batch.is_integer() else None


def topological_order(nodes: Mapping[int, ProfiledLayer]) -> list[int]:
    """Numbers of the layers in topological order; of the layers that are ready, the lowest number comes first, which is
    the order of the trace.

    Raises:
        ModelError: the edges form a cycle.
    """
    waiting = {number: len(node.before) for number, node in nodes.items()}
    ready = [number for number, count in waiting.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        number = heapq.heappop(ready)
        order.append(number)
        for reader in nodes[number].after:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        # Each waiting layer has a waiting layer before it, so a walk backwards visits some layer twice.
        number, seen = next(number for number, count in waiting.items() if count), list[int]()
        while number not in seen:
            seen.append(number)
            number = next(before for before in nodes[number].before if waiting[before])
        cycle = [*reversed(seen[seen.index(number) :])]
        shown = " -- ".join(f"node{n}" for n in (*cycle[:SHOWN], *(cycle[:1] if len(cycle) <= SHOWN else ())))
        text = f"line {nodes[number].line}: the edges form a cycle of {len(cycle)} layers through node{number}"
        raise refuse(text, shown, "Profile the forward pass only.")
    return order


def without_idle(nodes: Mapping[int, ProfiledLayer], order: Sequence[int]) -> list[int]:
    """`order` without layers that take no time and that no layer reads; the last one stays, as the model's result."""
    live: set[int] = set(order[-1:])
    for number in reversed(order):
        node = nodes[number]
        if node.parameters or node.forward_s or node.backward_s or any(reader in live for reader in node.after):
            live.add(number)
    return [number for number in order if number in live]
