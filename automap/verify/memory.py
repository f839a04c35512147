"""The memory of a plan, counted independently of the price: operator by operator, also in equal units. Units: bytes.

Saved activations are counted as *pieces* of memory. A piece is a tensor as its operator wrote it, or a copy of it in
the placement in which another operator reads it. Views of a piece are the same piece. A piece counts once, however many
operators need it.

The memory is that of the fullest moment. While the first backward pass of a step runs through a unit, a rank holds the
activations that this unit and the units before it saved, the bytes that the pass needs besides, and gradients: all of
them or, if the backward pass allocates them, those of this unit and of the units after it.

Parameters and optimizer state must be equal to those of the estimate. Activations, gradients and buffers together must
be between two counts, which differ only by the simplifications of the price:

- The price counts each unit separately, so a piece that two units need counts twice. A result that crosses to the next
  unit, such as that of a ReLU, counts in the next unit alone, even if that unit does not need it, or this unit is on
  another rank or is recomputed.
- A tensor that enters a unit beside the boundary tensor (a carried tensor) is assumed to be split by samples if the
  boundary tensor is, and else to be whole. This also holds for one from a unit which only hands it on. If the trainer
  saves this rank's part of tensors that it gathers, the whole carried tensor is assumed to be saved.
- Two views of one tensor with equal sizes count as the same memory, although one may be a copy in another placement
  (`automap.price.kernels.saved_activations`).
- If two units read a parameter, each of them is assumed to allocate its gradient.

The second simplification also applies to the buffers for tensors that cross between stages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from automap.arrays import Floats
from automap.execution import Cast, host_of
from automap.memory_band import margin
from automap.plan import DeviceMemory, Plan, format_devices
from automap.verify.model import Model
from automap.verify.moments import Gradients, Moment, Piece, Pieces
from automap.verify.parameters import Held, Place, held_parameters
from automap.verify.reading import Chunk, alike_ranks
from automap.verify.replicas import held_bytes
from automap.verify.schedule import Action, peaks, rank_orders
from ir.blocks import Unit
from ir.graph import DTYPE_BYTES, Operator
from ir.group_kinds import PRODUCTS
from ir.loss import scores_of_losses
from ir.operators.experts import PRODUCT as EXPERT_PRODUCT

GIB = float(1 << 30)


class Recount:
    """The memory of one plan.

    Args:
        plan: a plan that is sound in structure.
        chunks: its stages, with every operator placed.
        model: the model of the problem.
    """

    def __init__(self, plan: Plan, chunks: Sequence[Chunk], model: Model) -> None:
        self.plan, self.chunks, self.model = plan, chunks, model
        self.problem, self.graph = model.problem, model.graph
        units, producer = model.blocks.units, self.graph.producer
        passing = (u.boundary for u in units if u.boundary is not None and producer[u.boundary] < u.start)
        # A stage may send a view of a tensor that it made.
        self._carried = frozenset(map(model.root, (*model.carried, *passing)))
        self._viewed = frozenset(model.root(op.inputs[0]) for op in self.graph.operators if op.is_alias)
        self.home = {i: chunk for chunk in chunks for i in chunk.operators}

    def devices(self) -> tuple[tuple[DeviceMemory, Moment], ...]:
        """The memory of each pipeline rank in its fullest moment, by kinds of devices, and the bounds on that."""
        orders = rank_orders(self.plan)
        found = []
        for rank in range(len(orders)):
            for devices, samples in alike_ranks(self.plan, self.plan.stages[rank], self.problem).items():
                seen = [replace(chunk, samples=samples) if chunk.rank == rank else chunk for chunk in self.chunks]
                found.append(Recount(self.plan, seen, self.model)._of(rank, devices, orders[rank]))
        return tuple(found)

    def _of(self, rank: int, devices: Sequence[int], order: Sequence[Action]) -> tuple[DeviceMemory, Moment]:
        """Memory of some devices of a rank, with the samples of `chunks`, and the bounds on what it holds."""
        chunks = [chunk for chunk in self.chunks if chunk.rank == rank]
        zero, state_bytes, trainer = chunks[0].stage.zero.stage, self.problem.state_bytes, self.problem.trainer
        every = self._elements(i for chunk in chunks for i in chunk.operators)
        trained = self._elements((i for chunk in chunks for i in chunk.operators), trained=True)
        state = [some[zero >= least] for some, least in ((every, 3), (trained, 2), (trained, 1))]
        sizes, frozen_bytes = list(state_bytes), self.problem.frozen_bytes
        if zero >= 3 and frozen_bytes:
            # The shards of converted weights are their master copies, trained or frozen.
            sizes, frozen_bytes = [frozen_bytes, sizes[1], sizes[2] - frozen_bytes], 0.0
        parameters, gradients, optimizer = (n * size for n, size in zip(state, sizes, strict=True))
        optimizer += (every[zero >= 1] - trained[zero >= 1]) * frozen_bytes
        updating = trainer.update_bytes * trained[zero >= 1]
        update = Moment(activations=np.zeros(3), gradients=np.full(3, gradients), working=np.full(3, updating))
        held = Moment.fullest([self._fullest(chunks, order, gradients), update])
        replicas = math.prod(size for axis, size in chunks[0].sizes.items() if axis != "tp")
        if replicas > 1 and not zero:
            held = replace(held, working=held.working + trainer.bucket_bytes * trained[0])
        standing = trainer.reserved_GiB * GIB + trained[0] * held_bytes(self.plan, state_bytes[1])
        if len({chunk.rank for chunk in self.chunks}) > 1:
            num_buffers = trainer.crossing_buffers * self.plan.num_micro_batches
            standing += trainer.pipeline_GiB * GIB + num_buffers * self._crossing(rank)
        unused = trainer.unused_share * (parameters + optimizer + held.total)
        held = replace(held, working=held.working + unused + standing)
        capacity = (
            min(self.problem.cluster.device(d).memory_bytes for d in devices) - self.problem.hints.memory_reserve_bytes
        )
        memory = DeviceMemory(
            devices=format_devices(tuple(devices)),
            parameters=parameters,
            gradients=float(held.gradients[1]),
            optimizer=optimizer,
            activations=float(held.activations[1]),
            buffers=float(held.working[1]),
            capacity=capacity,
            reserve=capacity - capacity / margin(self.problem.training.memory_confidence, trainer.memory_spread),
        )
        return memory, held

    # -- the fullest moment --------------------------------------------------------------------------------------

    def _fullest(self, chunks: Sequence[Chunk], order: Sequence[Action], gradient_bytes: float) -> Moment:
        """The memory of a rank in its fullest moment.

        Args:
            chunks: stages of the rank.
            order: actions of the rank.
            gradient_bytes: bytes of all its gradients.
        """
        makes = not self.problem.trainer.keeps_gradients and self.plan.num_micro_batches == 1
        if makes:
            # All chunks run their forward passes before the first backward pass.
            return Moment.fullest([one for one, _ in self._moments(chunks, makes=True)[0]])
        moments = [self._moments([chunk], makes=False) for chunk in chunks]
        # The price counts whole bytes.
        kept = {
            chunk.number: [math.floor(saved[0]), saved[1], math.ceil(saved[2])]
            for chunk, (_, saved) in zip(chunks, moments, strict=True)
        }
        peak = np.array([peaks([order], {number: saved[i] for number, saved in kept.items()})[0] for i in range(3)])
        found = []
        for some, saved in moments:
            for one, until in some:
                # The activations of later units have been freed by then, so they are subtracted from the peak.
                held = peak - (saved - until)[::-1] + one.activations - until
                found.append(replace(one, activations=held, gradients=np.full(3, gradient_bytes)))
        return Moment.fullest(found)

    def _moments(self, chunks: Sequence[Chunk], *, makes: bool) -> tuple[list[tuple[Moment, Floats]], Floats]:
        """For each unit of some chunks: the memory of one micro-batch during its backward pass, and the bytes that it
        and the units before it save; and the bytes that all units save."""
        units = [(chunk, unit) for chunk in chunks for unit in self._units(chunk)]
        saved, behind = Pieces(self._carried, self._viewed), Gradients(self._gradient_size(chunks[0]))
        found, made = [], []
        for _, unit in reversed(units):
            of_unit = held_parameters(unit, self.home, self.model)
            behind.add({name: one for name, one in of_unit.items() if not self.graph.tensors[name].frozen})
            made.append(behind.counts() if makes else np.zeros(3))
        for (chunk, unit), gradients in zip(units, reversed(made), strict=True):
            kept = self._unit_keeps(chunk, unit, own=True)
            # The price counts a carried tensor as gathered, even if this rank could save only its own part of it.
            gathers = self.problem.trainer.regathers and self._carried
            gathered = self._unit_keeps(chunk, unit, own=False) if gathers else kept
            read = {piece for piece in gathered if piece.root in self._carried}
            before = saved.counts()
            saved.add(kept, kept | read | self._as_made(chunk, self._entering(unit)))
            activations = saved.counts() + self._unit_saves(chunk, unit)
            working = np.full(3, self._working(chunk, unit))
            has_loss = self.model.unit_of[unit[0]] == len(self.model.blocks.units) - 1
            if self.problem.training.overlap_expert_exchange and not has_loss:
                working += saved.counts() - before
            found.append((Moment(activations=activations, gradients=gradients, working=working), saved.counts()))
        return found, saved.counts()

    def _gradient_size(self, chunk: Chunk) -> Callable[[Held], float]:
        """Bytes of the gradient of a parameter that a rank holds."""
        size, is_sharded = self.problem.state_bytes[1], chunk.stage.zero.stage >= 2
        return lambda one: size * (one.shard if is_sharded else one.elements)

    def _working(self, chunk: Chunk, unit: Sequence[int]) -> float:
        """Bytes that a pass of a unit needs beside the saved activations."""
        zero, state_bytes, trainer = chunk.stage.zero.stage, self.problem.state_bytes, self.problem.trainer
        written = 2.0 * max(self._written(chunk, i) for i in unit)
        if zero < 2:
            return written
        # If ZeRO shards the weights: ZeRO 3 gathers those of two units, and gradients are whole until scattered.
        whole, shard = self._elements(unit)
        most = 0.0 if shard >= whole else math.inf if trainer.most_gathered is None else trainer.most_gathered
        gathered = min(2.0 * whole, most) * state_bytes[0] * (zero >= 3)
        gathered += min(self._elements(unit, trained=True)[0], most) * state_bytes[1]
        return written + gathered

    # -- parameters ----------------------------------------------------------------------------------------------

    def _elements(self, operators: Iterable[int], *, trained: bool = False) -> tuple[float, float]:
        """The elements of parameters that one rank holds for some operators, without ZeRO and with it.

        Args:
            operators: the operators.
            trained: whether only trained parameters count, which have gradients and optimizer state.
        """
        found = held_parameters(operators, self.home, self.model)
        held = [one for name, one in found.items() if not (trained and self.graph.tensors[name].frozen)]
        return math.fsum(one.elements for one in held), math.fsum(one.shard for one in held)

    # -- activations ---------------------------------------------------------------------------------------------

    def _units(self, chunk: Chunk) -> list[list[int]]:
        """The operators of a stage by unit, which are recomputed together."""
        found: dict[int, list[int]] = {}
        for index in chunk.operators:
            found.setdefault(self.model.unit_of[index], []).append(index)
        return list(found.values())

    def _unit_keeps(self, chunk: Chunk, unit: Sequence[int], *, own: bool) -> set[Piece]:
        """The pieces that a micro-batch saves in a unit from its forward pass to its backward pass; `own`: see
        `_piece`."""
        whole = chunk.again.issuperset(unit)
        keeps_results = self.problem.trainer.keeps_results and not chunk.again.isdisjoint(unit)
        pieces = self._unneeded_results(chunk, unit) if keeps_results else set()
        for index in unit:
            for slot, name in self._saved(index):
                root, maker = self.model.live_maker(self.model.root(name)), self.model.live_maker(name)
                runs_again = (keeps_results or index in chunk.again) and root in chunk.again and root in unit
                if not runs_again and not (whole and maker not in (None, *unit)):
                    pieces.add(self._piece(chunk, index, slot, name, own=own))
        return pieces | (self._inputs(chunk, unit) if whole else set())

    def _inputs(self, chunk: Chunk, unit: Sequence[int]) -> set[Piece]:
        """The saved inputs of a unit that is recomputed: as they arrive; but of an input that is P, the rank's own part
        if the trainer gathers such parts again."""
        found: dict[str, Piece] = {}
        for index, (slot, name) in ((i, one) for i in unit for one in enumerate(self.graph.operators[i].inputs)):
            if name not in found and self.model.live_maker(name) not in (None, *unit):
                place, read = self._made(chunk, name), self._read(chunk, index, slot)
                scattered = {a: read[a] for a, p in place.items() if p == "P" and read[a].startswith("S")}
                kept = {**place, **scattered} if self.problem.trainer.regathers else place
                found[name] = self._at(chunk, name, kept)
        return set(found.values())

    def _as_made(self, chunk: Chunk, names: Iterable[str | None]) -> set[Piece]:
        """The pieces that tensors are as they arrive at the operators of a stage."""
        return {self._at(chunk, name, self._made(chunk, name)) for name in names if name is not None}

    def _entering(self, unit: Sequence[int]) -> list[str]:
        """The boundary of the cut before a unit, if there is one."""
        number = self.model.unit_of[unit[0]]
        name = self.model.blocks.units[number - 1].boundary if number else None
        return [] if name is None else [name]

    def _unneeded_results(self, chunk: Chunk, unit: Sequence[int]) -> set[Piece]:
        """Results of operators that are not recomputed, if no backward pass of the unit needs them."""
        needed = {self.model.root(name) for index in unit for _, name in self._saved(index)}
        return {
            self._at(chunk, name, self._wrote(chunk, index, slot))
            for index in unit
            if index not in chunk.again
            for slot, name in enumerate(self.graph.operators[index].outputs)
            if self.model.root(name) not in needed and name not in self._inside(index)
        }

    def _inside(self, index: int) -> frozenset[str]:
        """Tensors that stay inside the kernel that runs an operator."""
        kernel = self.model.kernels.get(index)
        return frozenset() if kernel is None else kernel.internal

    def _unit_saves(self, chunk: Chunk, unit: Sequence[int]) -> Floats:
        """The bytes that a unit saves during its recomputation, without its inputs, which are saved in any case; 0 if
        it is not recomputed as a whole."""
        found = Pieces(self._carried, self._viewed)
        if chunk.again.issuperset(unit):
            inputs = self._inputs(chunk, unit)
            pieces, gathered = (
                {self._piece(chunk, i, slot, name, own=own) for i in unit for slot, name in self._saved(i)}
                for own in (True, False)
            )
            found.leave_out(inputs)
            # A result may be a view in another placement, and a carried tensor may count as gathered.
            of_carried = {piece for piece in gathered | inputs if piece.root in self._carried}
            leaving = self._as_made(chunk, [self._unit(unit[0]).boundary])
            found.add(pieces, (pieces - inputs) | of_carried | leaving)
        return found.counts()

    def _saved(self, index: int) -> Iterator[tuple[int, str]]:
        """(slot, tensor) of the activations and data that the backward pass of an operator needs; inputs come first."""
        op = self.graph.operators[index]
        kernel = self.model.kernels.get(index)
        needed = op.saved if kernel is None else kernel.saved
        for slot, name in enumerate((*op.inputs, *op.outputs)):
            is_result = slot == len(op.inputs)
            if (is_result and index in self.model.execution.kept_beside) or (
                name in needed and not self.graph.is_weight(name)
            ):
                yield slot, name

    def _piece(self, chunk: Chunk, index: int, slot: int, name: str, *, own: bool) -> Piece:
        """The memory that an operator needs of an operand or result.

        Args:
            chunk: the stage of the operator.
            index: the operator.
            slot: the position of the operand; positions after all operands are those of results.
            name: the tensor.
            own: whether a trainer that gathers operands again saves only this rank's part.
        """
        op = self.graph.operators[index]
        copy = self._copy(index, name)
        share = self._share(op) if copy is None else copy.copy / copy.source
        of = "" if copy is None else self._reader(index)
        if slot == len(op.inputs) and index in self.model.execution.kept_beside:
            share, of = self.model.execution.kept_beside[index], f"beside {op.name}"
            return self._at(chunk, name, self._wrote(chunk, index, 0), share, of)
        if slot >= len(op.inputs):
            return self._at(chunk, name, self._wrote(chunk, index, slot - len(op.inputs)), share)
        place = self._read(chunk, index, slot)
        if own and self.problem.trainer.regathers and self.model.live_maker(name) is not None:
            made = self._made(chunk, name)
            place = {a: made[a] if p == "B" and made[a].startswith("S") else p for a, p in place.items()}
        return self._at(chunk, name, place, share, of)

    def _share(self, op: Operator) -> float:
        """The saved bytes of an operand over those of the activation; products with a weight may save a quantised
        copy."""
        kinds = PRODUCTS | {EXPERT_PRODUCT}
        takes_weight = op.kind in kinds and any(name in self.model.parametric for name in op.inputs[:2])
        is_quantised = takes_weight and self.problem.trainer.keeps_quantised
        return self.problem.weight_bytes / self.problem.activation_bytes if is_quantised else 1.0

    def _copy(self, index: int, name: str) -> Cast | None:
        """The copy in another number format that an operator reads of an operand, if it reads one."""
        kernel = self.model.kernels.get(index)
        own = index if kernel is None else host_of(self.graph, kernel)
        return next((cast for cast in self.model.execution.casts.get(own, ()) if cast.tensor == name), None)

    def _reader(self, index: int) -> str:
        """A key for the readers of a copy: an operator, or all operators that multiply by pieces of one weight."""
        op = self.graph.operators[index]
        weights = map(self.graph.viewed, op.inputs)
        whole = next((self.graph.pieces[name][0] for name in weights if name in self.graph.pieces), op.name)
        return f"copy for {whole}"

    def _at(self, chunk: Chunk, name: str, place: Place, share: float = 1.0, of: str = "") -> Piece:
        """The piece of memory that holds a tensor in a placement, or the copy of it that `of` reads."""
        size, whole = (share * self._bytes(chunk, name, where) for where in (place, {}))
        root = self.model.root(name)
        maker = self.model.live_maker(name)
        while not of and maker is not None and maker in chunk.operators and place == self._made(chunk, name):
            if not self.graph.operators[maker].is_alias:
                break
            name, place = self.graph.operators[maker].inputs[0], self._read(chunk, maker, 0)
            maker = self.model.live_maker(name)
        return Piece(root=root + of, tensor=name, place=tuple(place.items()), share=share, size=size, whole=whole)

    def _crossing(self, rank: int) -> float:
        """Largest number of bytes of a micro-batch that a stage of a rank receives or sends."""
        return max(self._sent(one) for one, other in itertools.pairwise(self.chunks) if rank in (one.rank, other.rank))

    def _sent(self, chunk: Chunk) -> float:
        """Bytes of a micro-batch that a stage sends: its boundary tensor, and tensors that it hands on beside it."""
        last, producer = self._units(chunk)[-1], self.graph.producer
        unit = self._unit(last[0])
        passed = {name for name in unit.beside if producer[name] < unit.start}
        for offset, slot in self.model.blocks.handed_on[unit.type]:
            op = self.graph.operators[unit.start + offset]
            passed |= {(*op.inputs, *op.outputs)[slot]} if unit.start + offset in last else set()
        places = {name: self._made(chunk, name) for name in [unit.boundary] if name and producer[name] in last}
        for name in passed - set(places):
            # It is sent split by samples if it is made so, or if the tensor that enters the unit is.
            batch = f"S({self.graph.tensors[name].batch_dim})"
            given = [self._made(chunk, other) for other in ([name] if producer[name] in last else self._entering(last))]
            places[name] = {axis: batch if p == batch else "B" for place in given for axis, p in place.items()}
        return sum(self._bytes(chunk, name, place) for name, place in places.items())

    def _unit(self, index: int) -> Unit:
        """The unit of an operator."""
        return self.model.blocks.units[self.model.unit_of[index]]

    def _like(self, index: int) -> Operator:
        """The operator at the same position in the first unit of the same type, by which all units of it are priced."""
        unit = self._unit(index)
        return self.graph.operators[self.model.blocks.representative(unit.type).start + index - unit.start]

    # -- placements and sizes ------------------------------------------------------------------------------------

    def _read(self, chunk: Chunk, index: int, slot: int) -> Place:
        return {axis: placed.inputs[slot] for axis, placed in chunk.placed[index].items() if chunk.sizes[axis] > 1}

    def _wrote(self, chunk: Chunk, index: int, slot: int) -> Place:
        return {axis: placed.outputs[slot] for axis, placed in chunk.placed[index].items() if chunk.sizes[axis] > 1}

    def _made(self, chunk: Chunk, name: str) -> Place:
        """The placement in which a tensor arrives at the operators of a stage; one that is P is reduced before it is
        sent."""
        maker = self.graph.producer[name]
        home = self.home[maker]
        slot = self.graph.operators[maker].outputs.index(name)
        if home is chunk:
            return self._wrote(home, maker, slot)
        # A stage sends a tensor in the placement that its own operator states.
        written = {axis: placed.outputs[slot] for axis, placed in home.placed[maker].items()}
        place = {axis: written.get(axis, "B") for axis, size in chunk.sizes.items() if size > 1}
        batch = f"S({self.graph.tensors[name].batch_dim})"
        keeps = {batch} if name in self.model.carried else {p for p in place.values() if p.startswith("S")}
        return {axis: p if p in keeps else "B" for axis, p in place.items()}

    def _bytes(self, chunk: Chunk, name: str, place: Place) -> float:
        tensor = self.graph.tensors[name]
        element = self.problem.activation_bytes if tensor.is_float else DTYPE_BYTES.get(tensor.dtype, 4.0)
        element = self.model.execution.widths.get(name, element)
        parts = math.prod(chunk.sizes[axis] for axis, p in place.items() if p.startswith("S"))
        return tensor.elements.at(chunk.samples) * element / parts

    def _written(self, chunk: Chunk, index: int) -> float:
        """Bytes of the results that an operator writes to memory; for a loss, half of the bytes that it computes from
        its scores."""
        op, inside = self.graph.operators[index], self._inside(index)
        if not op.is_live:
            return 0.0
        like, scores = self._like(index), scores_of_losses(self.graph)
        written = sum(
            self._bytes(chunk, name, self._wrote(chunk, index, slot))
            for slot, name in enumerate(op.outputs)
            if name not in inside and like.outputs[slot] not in scores
        )
        read = [
            self._bytes(chunk, name, self._read(chunk, index, slot))
            for slot, name in enumerate(op.inputs)
            if name not in inside and like.inputs[slot] in scores
        ]
        of_loss = 0.5 * self.problem.trainer.loss_bytes / self.problem.activation_bytes * max(read, default=0.0)
        return max(written, of_loss)
