"""Measured layer graphs in PipeDream's text format, as Graphs.

A file states one layer a line and, below, the edges between them:

    node7 -- LSTM(2048, 1024) -- forward_compute_time=3.19, backward_compute_time=5.35,
             activation_size=[6291456.0; 131072.0], parameter_size=50364416.000      (one line)
        node7 -- node8

Times are milliseconds of a whole mini-batch, sizes bytes of 4-byte elements; `activation_size` is that of the outputs.
The number behind `pbs-` in a file name is the samples of that mini-batch (DAPPLE's files).

How it is read: a layer becomes a `Layer` operator with measured times. What no parameter precedes is data: it becomes
graph inputs, which every stage has by itself; the time of a source called Input... is that of the data loader and is
dropped, as PipeDream's optimizer does, other times of data go to the first layer that reads it. Of a list of output
sizes `__getitem__(k)` takes the k-th; a list with one size an edge gives each reader its own, equal sizes being the
same tensor; otherwise every reader takes all.

Cuts: layers stand in one topological order (linear time; the antichains of branching graphs, which PipeDream
enumerates, grow without bound). Where several tensors cross between two layers, a `Bundle` packs them and an
`Unbundle` behind it takes them apart, so that the cut is legal; see `_cuts` for where.

Knows nothing of devices. Units inside: seconds and elements of one sample.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ir.build import make_graph
from ir.errors import ModelError, ModelTooExpensive, refuse
from ir.graph import Graph, Operator, Tensor
from ir.operators import make_operator
from ir.operators.measured import LAYER

MAX_BYTES = 16 << 20
MAX_LAYERS = 5_000
MAX_EDGES = 50_000
MAX_LINE = 4_096
MAX_OUTPUTS = 64
MAX_CROSSING = 8
"""Tensors in one Bundle."""
MIN_CUT_SHARE = 1 / 8
"""Of the measured time; see `_cuts`."""
ELEMENT_BYTES = 4
"""Profiles were taken in float32."""
_LIMITS = {"time": 1e9, "size": float(1 << 48)}

_NODE = re.compile(
    r"node(\d{1,9}) -- (.*) -- forward_compute_time=([^,]*), backward_compute_time=([^,]*), "
    r"activation_size=(\[[^\]]*\]|[^,\[\]]*), parameter_size=([^\s,]*)(?: -- stage_id=\d+)?"
)
_EDGE = re.compile(r"node(\d{1,9}) -- node(\d{1,9})")
_FORM = (
    "Write `nodeN -- name -- forward_compute_time=ms, backward_compute_time=ms, activation_size=bytes, "
    "parameter_size=bytes` for each layer and `nodeA -- nodeB` for each edge."
)


@dataclass(slots=True)
class _Node:
    number: int
    label: str
    forward_s: float
    backward_s: float
    sizes: tuple[float, ...]
    """Bytes of the outputs, for the whole mini-batch."""
    parameters: float
    """Bytes."""
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)

    @property
    def item(self) -> int | None:
        """k of a `__getitem__(k)` that only picks from a tuple."""
        found = re.fullmatch(r"__getitem__\((\d{1,4})\)", self.label)
        picks = found and len(self.before) == 1 and not self.parameters and not (self.forward_s or self.backward_s)
        return int(found[1]) if found and picks else None


@dataclass(frozen=True, slots=True)
class _Layer:
    """A node with its tensors, before cuts."""

    node: _Node
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def is_profile(data: bytes) -> bool:
    """Whether a file is of this format, by how it begins."""
    return re.match(rb"\s*node\d+ -- ", data[:MAX_LINE]) is not None


def batch_in_name(name: str) -> int | None:
    """Samples of the profiled mini-batch as DAPPLE's file names state them: `bert-48-pbs-2` -> 2."""
    found = re.search(r"pbs[-_]?(\d{1,6})(?!\d)", name)
    return int(found[1]) if found and int(found[1]) > 0 else None


def read_profile(data: bytes, *, name: str = "", batch: int | None = None) -> Graph:
    """`load_profile` of the bytes of a file.

    Raises:
        ModelError: the bytes are no text, or see there.
    """
    if len(data) > MAX_BYTES:
        raise _expensive(f"the profile is larger than {MAX_BYTES} bytes", f"{len(data)} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise refuse("the profile is not UTF-8 text", f"byte {error.start}", _FORM) from None
    return load_profile(text, name=name, batch=batch)


def load_profile(text: str, *, name: str = "", batch: int | None = None) -> Graph:
    """Reads a measured layer graph; see the module.

    Args:
        text: of the file.
        name: of the graph, and where the batch is looked for.
        batch: samples of the mini-batch that was measured; default: the name's `pbs-N`, else what the classifier of an
            image model tells, else 1 with a warning.

    Raises:
        ModelError: names the line and what is wrong with it.
        ModelTooExpensive: more layers or edges than are read.
    """
    nodes = _parse(text)
    warnings = []
    if batch is None:
        batch = batch_in_name(name) or _batch_of_classifier(nodes)
    if batch is None:
        batch = 1
        warnings.append(
            "the profile does not say how many samples its mini-batch had: one sample here is that whole mini-batch; "
            "say `--dim batch=N` (in a request dims: {batch: N}) or put pbs-N into the name"
        )
    if batch < 1:
        raise ModelError("must be positive", field="dims.batch", value=batch, repair="Give the profiled batch size.")
    warnings += [
        f"times are those of the device and precision of the profile, at {batch} samples, and scale with samples",
        "a profile lists the outputs of layers only: activations inside them are missing from the memory",
    ]
    order = _live(nodes, _order(nodes))
    builder = _Builder(nodes, order, batch)
    return builder.finish(name or "profile", warnings, hashlib.sha256(text.encode()).hexdigest())


# -- text ---------------------------------------------------------------------------------------------------------


def _expensive(message: str, value: object) -> ModelTooExpensive:
    return ModelTooExpensive(
        message, field="model", value=value, repair="Profile coarser layers, such as whole blocks."
    )


def _parse(text: str) -> dict[int, _Node]:
    if text.count("\n") > MAX_LAYERS + MAX_EDGES:
        raise _expensive(f"the profile has more than {MAX_LAYERS + MAX_EDGES} lines", text.count("\n"))
    nodes: dict[int, _Node] = {}
    edges: dict[tuple[int, int], int] = {}
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line:
            continue
        if len(line) > MAX_LINE:
            raise refuse(f"line {number} is longer than {MAX_LINE} characters", line, _FORM)
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
            raise _expensive(f"the profile has more than {MAX_LAYERS} layers", len(nodes))
    if len(edges) > MAX_EDGES:
        raise _expensive(f"the profile has more than {MAX_EDGES} edges", len(edges))
    for (source, target), number in edges.items():
        for end in (source, target):
            if end not in nodes:
                raise refuse(f"line {number}: node{end} is not there", f"node{source} -- node{target}", _FORM)
        nodes[source].after.append(target)
        nodes[target].before.append(source)
    if not any(node.parameters for node in nodes.values()):
        raise refuse("no layer has parameters", f"{len(nodes)} layers", "Profile a model that is trained.")
    return nodes


def _node(line: str, number: int) -> _Node:
    found = _NODE.fullmatch(line)
    if found is None:
        raise refuse(f"line {number} is neither a layer nor an edge", line, _FORM)
    sizes = found[5].strip("[]").split(";")
    if len(sizes) > MAX_OUTPUTS:
        raise refuse(f"line {number}: more than {MAX_OUTPUTS} outputs", line, "Profile coarser layers.")
    return _Node(
        number=int(found[1]),
        label=found[2].strip(),
        forward_s=1e-3 * _number(found[3], number, "forward_compute_time", "time"),
        backward_s=1e-3 * _number(found[4], number, "backward_compute_time", "time"),
        sizes=tuple(_number(size, number, "activation_size", "size") for size in sizes),
        parameters=_number(found[6], number, "parameter_size", "size"),
    )


def _number(text: str, line: int, what: str, kind: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise refuse(f"line {line}: {what} is not a number", text, "Write milliseconds and bytes.") from None
    if not (math.isfinite(value) and 0.0 <= value <= _LIMITS[kind]):
        raise refuse(f"line {line}: {what} is out of range", text, f"Give 0 to {_LIMITS[kind]:g}.")
    return value


def _batch_of_classifier(nodes: Mapping[int, _Node]) -> int | None:
    """Samples by the classifier of a convolutional network: its outputs are `[batch, out_features]`."""
    if not any(node.label.startswith("Conv2d(") for node in nodes.values()):
        return None
    found = set()
    for node in nodes.values():
        features = re.match(r"Linear\(.*out_features=(\d{1,9})\b", node.label)
        if features and int(features[1]):
            found.add(node.sizes[0] / (ELEMENT_BYTES * int(features[1])))
    batch = found.pop() if len(found) == 1 else 0.0
    return int(batch) if batch >= 1 and batch.is_integer() else None


# -- order --------------------------------------------------------------------------------------------------------


def _order(nodes: Mapping[int, _Node]) -> list[int]:
    """Topological order; of the layers that are ready the lowest number (as traced) comes first."""
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
        stuck = next(number for number, count in waiting.items() if count)
        raise refuse("the edges form a cycle", f"through or before node{stuck}", "Profile the forward pass only.")
    return order


def _live(nodes: Mapping[int, _Node], order: Sequence[int]) -> list[int]:
    """Without layers that cost nothing and that nothing reads; the last one is the result of the model."""
    live: set[int] = set(order[-1:])
    for number in reversed(order):
        node = nodes[number]
        if node.parameters or node.forward_s or node.backward_s or any(reader in live for reader in node.after):
            live.add(number)
    return [number for number in order if number in live]


# -- graph --------------------------------------------------------------------------------------------------------


class _Builder:
    def __init__(self, nodes: Mapping[int, _Node], order: Sequence[int], batch: int) -> None:
        self.nodes = nodes
        self.order = order
        self.batch = batch
        self.place = {number: i for i, number in enumerate(order)}
        self.tensors: dict[str, Tensor] = {}
        self.operators: list[Operator] = []
        self.made: dict[int, tuple[str, ...]] = {}
        """node -> tensors of its outputs."""
        self.forward_s = {number: nodes[number].forward_s for number in order}
        self.backward_s = {number: nodes[number].backward_s for number in order}

    def finish(self, name: str, warnings: Sequence[str], sha256: str) -> Graph:
        layers = self._layers()
        read = {tensor for layer in layers for tensor in layer.inputs}
        results = [t for layer in layers if read.isdisjoint(layer.outputs) for t in layer.outputs]
        last = {t: i for i, layer in enumerate(layers) for t in layer.inputs}
        last.update(dict.fromkeys(results, len(layers)))
        now: dict[str, str] = {}
        cuts = _cuts(layers, last, [self._seconds(layer) for layer in layers])
        for i, layer in enumerate(layers):
            self._add_layer(layer, [now.get(t, t) for t in layer.inputs])
            if i in cuts:
                self._add_cut(layer.node.number, cuts[i], now)
        self._add("LayerLoss", "loss", [now.get(t, t) for t in results], ["loss"])
        return make_graph(self.operators, self.tensors, ("loss",), name=name, warnings=tuple(warnings), sha256=sha256)

    def _seconds(self, layer: _Layer) -> float:
        return self.forward_s[layer.node.number] + self.backward_s[layer.node.number]

    def _layers(self) -> list[_Layer]:
        """Layers in order; data become inputs of the graph, picks from tuples go away."""
        data: set[int] = set()
        layers = []
        for number in self.order:
            node = self.nodes[number]
            before = [b for b in node.before if b in self.place]
            if node.item is not None and before:
                self.made[number] = self._read(before[0], number)
                if before[0] in data:
                    data.add(number)
            elif not node.parameters and all(b in data for b in before):
                data.add(number)
                self._hand_on(node)
                self._outputs(node, "input")
            else:
                inputs = dict.fromkeys(t for b in before for t in self._read(b, number))
                if not inputs:
                    self._tensor("data", 1, "input")
                    inputs = {"data": None}
                outputs = tuple(dict.fromkeys(self._outputs(node, "activation")))
                layers.append(_Layer(node, tuple(inputs), outputs))
        return layers

    def _hand_on(self, node: _Node) -> None:
        """The time of data goes to the first layer that reads it, that of the data loader to nobody."""
        number = node.number
        readers = [self.place[r] for r in node.after if r in self.place]
        is_loader = not node.before and node.label.lower().startswith("input")
        if readers and not is_loader:
            first = self.order[min(readers)]
            self.forward_s[first] += self.forward_s[number]
            self.backward_s[first] += self.backward_s[number]

    def _tensor(self, name: str, elements: int, role: str) -> str:
        self.tensors[name] = Tensor(name=name, shape=(1, elements), dtype="float32", role=role, batch_dim=0)  # type: ignore[arg-type]
        return name

    def _outputs(self, node: _Node, role: str) -> tuple[str, ...]:
        """Tensors of a node, in the order of its sizes; equal sizes that go to one reader each are one tensor."""
        sizes = [max(1, round(size / ELEMENT_BYTES / self.batch)) for size in node.sizes]
        known: dict[int, str] = {}
        names = []
        for i, size in enumerate(sizes):
            name = f"node{node.number}" if len(sizes) == 1 else f"node{node.number}.{i}"
            if self._one_an_edge(node):
                name = known.setdefault(size, name)
            names.append(name if name in self.tensors else self._tensor(name, size, role))
        self.made[node.number] = tuple(names)
        return tuple(names)

    def _one_an_edge(self, node: _Node) -> bool:
        return 1 < len(node.sizes) == len(node.after) and all(self.nodes[r].item is None for r in node.after)

    def _read(self, source: int, reader: int) -> tuple[str, ...]:
        """What `reader` takes of the outputs of `source`."""
        made, node = self.made[source], self.nodes[source]
        item = self.nodes[reader].item
        if item is not None and item < len(made):
            return made[item : item + 1]
        if node.item is None and self._one_an_edge(node):
            at = node.after.index(reader)
            return made[at : at + 1]
        return made

    def _add(self, kind: str, name: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: object) -> None:
        built = make_operator(
            kind, name=name, inputs=[self.tensors[n] for n in inputs], outputs=outputs, attributes=attributes
        )
        self.operators.append(built.operator)
        self.tensors.update((t.name, t) for t in built.outputs)

    def _add_layer(self, layer: _Layer, inputs: Sequence[str]) -> None:
        node = layer.node
        names = list(inputs)
        if node.parameters:
            weight = f"node{node.number}.parameters"
            elements = max(1, round(node.parameters / ELEMENT_BYTES))
            self.tensors[weight] = Tensor(name=weight, shape=(elements,), dtype="float32", role="parameter")
            names.append(weight)
        label = re.sub(r"[^\w.\-]+", "_", node.label.partition("(")[0]).strip("_")[:60]
        sizes = tuple(self.tensors[t].num_elements for t in layer.outputs)
        self._add(LAYER, f"node{node.number}/{label or LAYER}", names, layer.outputs, sizes=sizes)
        self.operators[-1] = replace(
            self.operators[-1],
            measured_forward_s=self.forward_s[node.number] / self.batch,
            measured_backward_s=self.backward_s[node.number] / self.batch,
        )

    def _add_cut(self, number: int, crossing: Sequence[str], now: dict[str, str]) -> None:
        """One tensor in place of all that cross behind layer `number`."""
        packed = f"node{number}#bundle"
        self._add("Bundle", packed, [now.get(t, t) for t in crossing], [packed])
        fresh = [f"{t}@{number}" for t in crossing]
        sizes = tuple(self.tensors[t].num_elements for t in crossing)
        self._add("Unbundle", f"node{number}#unbundle", [packed], fresh, sizes=sizes)
        now.update(zip(crossing, fresh, strict=True))


def _cuts(layers: Sequence[_Layer], last: Mapping[str, int], seconds: Sequence[float]) -> dict[int, tuple[str, ...]]:
    """Layer index -> the tensors to bundle behind it. Linear in the graph.

    Where one tensor crosses, the cut needs no help. Where several do, a cut is worth having unless better ones are
    near: it is left out when fewer tensors cross at a place before and at a place behind it with less than
    `MIN_CUT_SHARE` of all measured time between the two (the inside of a residual block), when more than
    `MAX_CROSSING` cross, or when no layer with parameters stands between it and the next cut.
    """
    places = len(layers) - 1
    counts = []
    crossing: list[tuple[str, ...] | None] = []
    live: dict[str, None] = {}
    for i, layer in enumerate(layers[:places]):
        live.update((t, None) for t in layer.outputs if last.get(t, -1) > i)
        for t in layer.inputs:
            if last[t] <= i:
                live.pop(t, None)
        counts.append(len(live))
        crossing.append(tuple(live) if 1 < len(live) <= MAX_CROSSING else None)
    done = [0.0]
    for spent in seconds:
        done.append(done[-1] + spent)
    lower = _nearest_smaller(counts)
    higher = [places - 1 - i for i in _nearest_smaller(counts[::-1])][::-1]
    cuts: dict[int, tuple[str, ...]] = {}
    trains = bool(layers and layers[-1].node.parameters)
    for i in range(places - 1, -1, -1):
        tensors = crossing[i]
        between = done[min(higher[i], places) + 1] - done[lower[i] + 1]
        if counts[i] == 1:
            trains = False
        elif tensors is not None and trains and between >= MIN_CUT_SHARE * done[-1]:
            cuts[i] = tensors
            trains = False
        trains = trains or layers[i].node.parameters > 0
    return cuts


def _nearest_smaller(counts: Sequence[int]) -> list[int]:
    """Of each place the nearest one before it with a smaller count, -1 if there is none."""
    found, stack = [], [-1]
    for i, count in enumerate(counts):
        while stack[-1] >= 0 and counts[stack[-1]] >= count:
            stack.pop()
        found.append(stack[-1])
        stack.append(i)
    return found
