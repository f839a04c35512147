"""Memory counted again, operator by operator: no tables, no repeats recognised, no bounds. Units: bytes.

What a chunk keeps is followed as pieces of memory: a tensor as its operator wrote it, or a copy of it in the placement
in which another operator reads it. Views of a piece are that piece. A piece is kept once, however many need it.

Where this and the price do not agree to the last byte:
- the price keeps a piece once a unit, here it is kept once a chunk; so a tensor between two units whose maker and
  reader both need it, or one that many units read (the memory of an encoder), may be counted more than once there;
- the price takes copies of equal size for the same, here they are unlike if their placements are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from automap.plan import DeviceMemory, Plan
from automap.verify.actions import peaks, rank_orders
from automap.verify.reading import Chunk, Model, Violation, devices_of
from ir.graph import DTYPE_BYTES, Operator

STATES_TOLERANCE = 1e-6
"""Relative; of parameters, gradients, optimizer state and buffers, where both counts are sums of the same terms."""
ACTIVATIONS_TOLERANCE = 0.05
"""Relative; see the module for what differs."""
GIB = float(1 << 30)

Place = Mapping[str, str]
"""Axis -> S(i), B or P."""
Piece = tuple[str, tuple[tuple[str, str], ...], float]
"""Tensor and placement of a piece of memory, and the bytes of it that are needed."""


class Recount:
    """The memory of one plan.

    Args:
        plan: sound in structure.
        chunks: its stages, with every operator placed.
        model: of the problem.
    """

    def __init__(self, plan: Plan, chunks: Sequence[Chunk], model: Model) -> None:
        self.plan, self.chunks, self.model = plan, chunks, model
        self.problem, self.graph = model.problem, model.graph
        self.home = {i: chunk for chunk in chunks for i in chunk.operators}

    def devices(self) -> tuple[DeviceMemory, ...]:
        """Peak memory of the devices of each pipeline rank."""
        kept = {chunk.number: math.ceil(self._kept(chunk)) for chunk in self.chunks}
        most = peaks(rank_orders(self.plan), kept)
        return tuple(self._rank(rank, peak) for rank, peak in enumerate(most))

    def _rank(self, rank: int, peak: float) -> DeviceMemory:
        chunks = [chunk for chunk in self.chunks if chunk.rank == rank]
        zero = chunks[0].stage.zero.stage
        state_bytes = self.problem.state_bytes
        whole, sharded = self._elements(i for chunk in chunks for i in chunk.operators)
        held = [sharded if zero >= least else whole for least in (3, 2, 1)]
        parameters, gradients, optimizer = (n * size for n, size in zip(held, state_bytes, strict=True))
        # Under ZeRO the weights of one unit, and of the next one, are gathered; its gradients are whole until scattered.
        largest = max(self._elements(unit)[0] for chunk in chunks for unit in self._units(chunk))
        gathered = 2.0 * largest * state_bytes[0] * (zero >= 3) + largest * state_bytes[1] * (zero >= 2)
        work = max(self._written(chunk, i) for chunk in chunks for i in chunk.operators)
        again = [self._unit_saves(chunk, unit) for chunk in chunks for unit in self._units(chunk)]
        devices = [self.problem.cluster.device(d) for d in devices_of(chunks[0].stage)]
        return DeviceMemory(
            devices=chunks[0].stage.devices,
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            activations=peak + max(again),
            buffers=2.0 * work + self.problem.trainer.reserved_GiB * GIB + gathered,
            capacity=min(d.memory_bytes for d in devices) - self.problem.hints.memory_reserve_bytes,
        )

    # -- parameters ----------------------------------------------------------------------------------------------

    def _elements(self, operators: Iterable[int]) -> tuple[float, float]:
        """Elements of the parameters that one rank holds for these operators, without and with ZeRO's shards."""
        whole = sharded = 0.0
        seen: set[str] = set()
        for index in operators:
            chunk = self.home[index]
            for slot, name in enumerate(self.graph.operators[index].inputs):
                if self.graph.tensors[name].role != "parameter" or name in seen:
                    continue
                seen.add(name)
                place = self._read(chunk, index, slot)
                mine = self.graph.tensors[name].num_elements / self._parts(chunk, place)
                whole += mine
                zero = (chunk.sizes[a] for a, p in place.items() if a in chunk.stage.zero.axes and p == "B")
                sharded += mine / math.prod(zero)
        return whole, sharded

    # -- activations ---------------------------------------------------------------------------------------------

    def _units(self, chunk: Chunk) -> list[list[int]]:
        """The operators of a chunk by unit: what is recomputed together."""
        found: dict[int, list[int]] = {}
        for index in chunk.operators:
            found.setdefault(self.model.unit_of[index], []).append(index)
        return list(found.values())

    def _kept(self, chunk: Chunk) -> float:
        """Bytes that one micro-batch keeps of a chunk."""
        pieces: set[Piece] = set()
        for unit in self._units(chunk):
            if chunk.again.issuperset(unit):
                pieces.update(self._entering(chunk, unit))
            for index in unit:
                for slot, name in self._saved(index):
                    maker = self._root_maker(name)
                    if not (index in chunk.again and maker in chunk.again and maker in unit):
                        pieces.add(self._piece(chunk, index, slot, name, own=True))
        return sum(size for _, _, size in pieces)

    def _unit_saves(self, chunk: Chunk, unit: Sequence[int]) -> float:
        """Bytes that a unit keeps while it is run again; nothing if it is not run again as a whole."""
        if not chunk.again.issuperset(unit):
            return 0.0
        pieces = {self._piece(chunk, i, slot, name, own=False) for i in unit for slot, name in self._saved(i)}
        return sum(size for _, _, size in pieces)

    def _saved(self, index: int) -> Iterator[tuple[int, str]]:
        """Operand slots, inputs first, of the activations and data that the backward pass of an operator needs."""
        op = self.graph.operators[index]
        kernel = self.model.kernels.get(index)
        needed = op.saved if kernel is None else kernel.saved
        for slot, name in enumerate((*op.inputs, *op.outputs)):
            if name in needed and name not in self.model.parametric:
                yield slot, name

    def _entering(self, chunk: Chunk, unit: Sequence[int]) -> Iterator[Piece]:
        """What crosses into a unit that is run again, as it comes."""
        for index in unit:
            for name in self.graph.operators[index].inputs:
                maker = self.model.live_maker(name)
                if maker is not None and maker not in unit:
                    place = self._made(chunk, name)
                    yield self._at(chunk, name, place)

    def _root_maker(self, name: str) -> int | None:
        """The operator that wrote the memory of a tensor."""
        maker = self.model.live_maker(name)
        while maker is not None and _is_alias(self.graph.operators[maker]):
            maker = self.model.live_maker(self._viewed(maker)[1])
        return maker

    def _viewed(self, index: int) -> tuple[int, str]:
        """The input, slot and name, whose memory an alias shares."""
        inputs = self.graph.operators[index].inputs
        slots = [slot for slot, name in enumerate(inputs) if name not in self.model.parametric]
        return (slots or [0])[0], inputs[(slots or [0])[0]]

    def _piece(self, chunk: Chunk, index: int, slot: int, name: str, *, own: bool) -> Piece:
        """The memory that an operator needs of an operand; `own`: only the rank's part, if the trainer gathers again."""
        op = self.graph.operators[index]
        if slot >= len(op.inputs):
            return self._at(chunk, name, self._wrote(chunk, index, slot - len(op.inputs)))
        place = self._read(chunk, index, slot)
        if own and self.problem.trainer.regathers and self.model.live_maker(name) is not None:
            made = self._made(chunk, name)
            place = {a: made[a] if p == "B" and made[a].startswith("S") else p for a, p in place.items()}
        return self._at(chunk, name, place)

    def _at(self, chunk: Chunk, name: str, place: Place) -> Piece:
        """The piece of memory that holds a tensor in a placement."""
        size = self._bytes(chunk, name, place)
        maker = self.model.live_maker(name)
        while maker in chunk.operators and maker is not None and place == self._made(chunk, name):
            op = self.graph.operators[maker]
            if not _is_alias(op):
                break
            slot, name = self._viewed(maker)
            place = self._read(chunk, maker, slot)
            maker = self.model.live_maker(name)
        return name, tuple(place.items()), size

    # -- placements and sizes ------------------------------------------------------------------------------------

    def _read(self, chunk: Chunk, index: int, slot: int) -> Place:
        return {axis: placed.inputs[slot] for axis, placed in chunk.placed[index].items()}

    def _wrote(self, chunk: Chunk, index: int, slot: int) -> Place:
        return {axis: placed.outputs[slot] for axis, placed in chunk.placed[index].items()}

    def _made(self, chunk: Chunk, name: str) -> Place:
        """The placement in which a tensor comes to the operators of a chunk: sums are taken before they are sent."""
        maker = self.graph.producer[name]
        home = self.home[maker]
        place = self._wrote(home, maker, self.graph.operators[maker].outputs.index(name))
        if home is chunk:
            return place
        place = {axis: place.get(axis, "B") for axis in chunk.sizes}
        batch = f"S({self.graph.tensors[name].batch_dim})"
        keeps = {batch} if name in self.model.carried else {p for p in place.values() if p.startswith("S")}
        return {axis: p if p in keeps else "B" for axis, p in place.items()}

    def _parts(self, chunk: Chunk, place: Place) -> int:
        return math.prod(chunk.sizes[axis] for axis, p in place.items() if p.startswith("S"))

    def _bytes(self, chunk: Chunk, name: str, place: Place) -> float:
        tensor = self.graph.tensors[name]
        element = self.problem.activation_bytes if tensor.is_float else DTYPE_BYTES.get(tensor.dtype, 4.0)
        elements = tensor.elements.at(self.plan.samples_per_micro_batch)
        return elements * element / self._parts(chunk, place)

    def _written(self, chunk: Chunk, index: int) -> float:
        """Bytes of the results that an operator writes to memory."""
        kernel = self.model.kernels.get(index)
        inside = frozenset() if kernel is None else kernel.internal
        outputs = self.graph.operators[index].outputs
        return sum(
            self._bytes(chunk, name, self._wrote(chunk, index, slot))
            for slot, name in enumerate(outputs)
            if name not in inside
        )


def _is_alias(op: Operator) -> bool:
    """Whether the result shares the memory of an input."""
    return op.traffic[0] == 0.0 and len(op.outputs) == 1 and len(op.inputs) >= 1


def check_memory(plan: Plan, chunks: Sequence[Chunk], model: Model) -> Iterator[Violation]:
    """The estimate's memory against the recount, and the recount against what the devices have."""
    found = Recount(plan, chunks, model).devices()
    for rank, mine in enumerate(found):
        if mine.total > mine.capacity:
            yield Violation(
                where=f"stages[{rank}].devices",
                what=f"does not fit: {mine.total / GIB:.2f} GiB of {mine.capacity / GIB:.2f} on {mine.devices}",
            )
    if plan.estimate is None:
        return
    stated = plan.estimate.memory_bytes
    if [m.devices for m in stated] != [m.devices for m in found]:
        yield Violation(where="estimate.memory_bytes", what=f"not about {', '.join(m.devices for m in found)}")
        return
    for rank, (theirs, mine) in enumerate(zip(stated, found, strict=True)):
        for name in ("parameters", "gradients", "optimizer", "activations", "buffers", "capacity"):
            tolerance = ACTIVATIONS_TOLERANCE if name == "activations" else STATES_TOLERANCE
            said, counted = getattr(theirs, name), getattr(mine, name)
            if not math.isclose(said, counted, rel_tol=tolerance, abs_tol=1.0):
                yield Violation(
                    where=f"estimate.memory_bytes[{rank}].{name}", what=f"says {said:.0f} bytes, counted {counted:.0f}"
                )
