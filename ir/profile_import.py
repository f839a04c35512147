"""Measured layer graphs in PipeDream's text format, as Graphs.

A layer of the file (`ir.profile_text`) becomes a `Layer` operator with measured times.

- Layers before the first parameters are data: they become graph inputs, which every stage has. The time of a source
  called Input... is that of the data loader and is dropped, as in PipeDream's optimizer; the time of other data is
  added to the first layer that reads it.
- If a layer has a list of output sizes, `__getitem__(k)` reads the k-th output. If the list has one size for each edge,
  each reader has its own output, and outputs of equal size are the same tensor. Otherwise every reader reads all.
- The number after `pbs-` in a file name is the number of samples of the measured mini-batch (DAPPLE's files).

Cuts: layers are in one topological order, which takes linear time. (PipeDream enumerates the antichains of branching
graphs, whose number grows without bound.) Where several tensors cross between two layers, a `Bundle` packs them and an
`Unbundle` after it unpacks them, so that the cut is legal; `_cuts` chooses the places.

Nothing here depends on devices. Units: seconds and elements of one sample.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ir.build import make_graph
from ir.cuts import nearest_smaller
from ir.errors import ModelError, refuse
from ir.graph import Graph, Operator, Tensor
from ir.operators import make_operator
from ir.operators.measured import LAYER
from ir.profile_text import (
    ELEMENT_BYTES,
    FORM,
    MAX_LINE,
    ProfiledLayer,
    batch_of_classifier,
    expensive,
    parse,
    topological_order,
    without_idle,
)

MAX_BYTES = 16 << 20
"""Bytes of the largest file that is read (assumed)."""
MAX_CROSSING = 8
"""Largest number of tensors in one Bundle (assumed)."""
MIN_CUT_SHARE = 1 / 64
"""Least share of the measured time around a cut with several tensors, see `_cuts`. With 1/8, ResNet-50 has few cuts
inside its residual blocks, and pipelines of 4, 8 and 16 stages take 2, 13 and 93 % longer
(`benchmarks/finer_pipelines.py branches`)."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A profiled layer with the names of its tensors, before cuts."""

    node: ProfiledLayer
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def is_profile(data: bytes) -> bool:
    """Whether a file is in this format, by its first bytes."""
    return re.match(rb"\s*node\d+ -- ", data[:MAX_LINE]) is not None


def batch_in_name(name: str) -> int | None:
    """Samples of the profiled mini-batch, if a file name states them as DAPPLE's do: `bert-48-pbs-2` -> 2."""
    found = re.search(r"pbs[-_]?(\d{1,6})(?!\d)", name)
    return int(found[1]) if found and int(found[1]) > 0 else None


def read_profile(data: bytes, *, name: str = "", batch: int | None = None) -> Graph:
    """Reads the bytes of a file; see `load_profile`.

    Raises:
        ModelError: the bytes are not text, or not such a profile.
    """
    if len(data) > MAX_BYTES:
        raise expensive(f"the profile is larger than {MAX_BYTES} bytes", f"{len(data)} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise refuse("the profile is not UTF-8 text", f"byte {error.start}", FORM) from None
    return load_profile(text, name=name, batch=batch)


def load_profile(text: str, *, name: str = "", batch: int | None = None) -> Graph:
    """Reads a measured layer graph; see the module.

    Args:
        text: text of the file.
        name: name of the graph; `pbs-N` in it states the samples of the measured mini-batch.
        batch: samples of the measured mini-batch. By default, the number in the name, else that of the classifier of an
            image model, else 1 with a warning.

    Raises:
        ModelError: names the line and what is wrong with it.
        ModelTooExpensive: more layers or edges than are read.
    """
    nodes = parse(text)
    warnings = []
    if batch is None:
        batch = batch_in_name(name) or batch_of_classifier(nodes)
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
    order = without_idle(nodes, topological_order(nodes))
    builder = _Builder(nodes, order, batch)
    return builder.finish(name or "profile", warnings, hashlib.sha256(text.encode()).hexdigest())


class _Builder:
    """Operators and tensors of the graph, layer by layer."""

    def __init__(self, nodes: Mapping[int, ProfiledLayer], order: Sequence[int], batch: int) -> None:
        self.nodes = nodes
        self.order = order
        self.batch = batch
        self.place = {number: i for i, number in enumerate(order)}
        self.tensors: dict[str, Tensor] = {}
        self.operators: list[Operator] = []
        self.made: dict[int, tuple[str, ...]] = {}
        """Number of a layer -> names of the tensors it writes."""
        self.forward_s = {number: nodes[number].forward_s for number in order}
        self.backward_s = {number: nodes[number].backward_s for number in order}

    def finish(self, name: str, warnings: Sequence[str], sha256: str) -> Graph:
        layers = self._layers()
        read = {tensor for layer in layers for tensor in layer.inputs}
        results = [t for layer in layers if read.isdisjoint(layer.outputs) for t in layer.outputs]
        last = {t: i for i, layer in enumerate(layers) for t in layer.inputs}
        last.update(dict.fromkeys(results, len(layers)))
        now: dict[str, str] = {}
        elements = {name: tensor.num_elements for name, tensor in self.tensors.items()}
        cuts = _cuts(layers, last, [self._seconds(layer) for layer in layers], elements)
        for i, layer in enumerate(layers):
            self._add_layer(layer, [now.get(t, t) for t in layer.inputs])
            if i in cuts:
                self._add_cut(layer.node.number, cuts[i], now)
        self._add("LayerLoss", "loss", [now.get(t, t) for t in results], ["loss"])
        return make_graph(self.operators, self.tensors, ("loss",), name=name, warnings=tuple(warnings), sha256=sha256)

    def _seconds(self, layer: _Layer) -> float:
        return self.forward_s[layer.node.number] + self.backward_s[layer.node.number]

    def _layers(self) -> list[_Layer]:
        """Layers in order; data become inputs of the graph, and each `__getitem__` becomes the output that it reads."""
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

    def _hand_on(self, node: ProfiledLayer) -> None:
        """Adds the time of data to the first layer that reads it, except for that of the data loader."""
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

    def _outputs(self, node: ProfiledLayer, role: str) -> tuple[str, ...]:
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

    def _one_an_edge(self, node: ProfiledLayer) -> bool:
        return 1 < len(node.sizes) == len(node.after) and all(self.nodes[r].item is None for r in node.after)

    def _read(self, source: int, reader: int) -> tuple[str, ...]:
        """Names of the outputs of layer `source` that layer `reader` takes."""
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
        """Adds a Bundle and an Unbundle of all tensors that cross after layer `number`, whose names `now` keeps."""
        packed = f"node{number}#bundle"
        self._add("Bundle", packed, [now.get(t, t) for t in crossing], [packed])
        fresh = [f"{t}@{number}" for t in crossing]
        sizes = tuple(self.tensors[t].num_elements for t in crossing)
        self._add("Unbundle", f"node{number}#unbundle", [packed], fresh, sizes=sizes)
        now.update(zip(crossing, fresh, strict=True))


def _cuts(
    layers: Sequence[_Layer], last: Mapping[str, int], seconds: Sequence[float], elements: Mapping[str, int]
) -> dict[int, tuple[str, ...]]:
    """Index of a layer -> the tensors to bundle after it. Takes linear time.

    No bundle is needed where a single tensor crosses. Between two layers with parameters, the place with the fewest
    crossing elements is chosen, unless a single tensor crosses at another place there, or more than `MAX_CROSSING`
    tensors cross everywhere. The cut is left out if better ones are near: if fewer elements cross at a place before and
    at a place after it, with less than `MIN_CUT_SHARE` of all measured time between these (inside a short branch).

    Args:
        layers: layers in order.
        last: tensor -> index of the last layer that reads it.
        seconds: [layers] time of both passes.
        elements: tensor -> elements of one sample.
    """
    places = len(layers) - 1
    sizes: list[int] = []
    crossing: list[tuple[str, ...]] = []
    live: dict[str, None] = {}
    for i, layer in enumerate(layers[:places]):
        live.update((t, None) for t in layer.outputs if last.get(t, -1) > i)
        for t in layer.inputs:
            if last[t] <= i:
                live.pop(t, None)
        crossing.append(tuple(live))
        sizes.append(sum(elements[t] for t in live))
    done = [0.0]
    for spent in seconds:
        done.append(done[-1] + spent)
    lower = nearest_smaller(sizes)
    higher = [places - 1 - i for i in nearest_smaller(sizes[::-1])][::-1]
    trained = [i for i, layer in enumerate(layers) if layer.node.parameters]
    cuts: dict[int, tuple[str, ...]] = {}
    for one, other in itertools.pairwise(trained):
        between = range(one, other)
        if any(len(crossing[i]) == 1 for i in between):
            continue
        i = min(between, key=lambda i: (len(crossing[i]) > MAX_CROSSING, sizes[i]))
        apart = done[min(higher[i], places) + 1] - done[lower[i] + 1]
        if 1 < len(crossing[i]) <= MAX_CROSSING and apart >= MIN_CUT_SHARE * done[-1]:
            cuts[i] = crossing[i]
    return cuts
