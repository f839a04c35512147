"""Meshes: the shapes that plans of a problem may have, found before any operator is looked at.

A mesh has the axes (dp, tp), the last one over consecutive devices. Models that can use a third axis have it between
the two (`middle_axis`). The names are only labels: every axis has the same signatures to choose from. Stages of a
pipeline may differ in dp alone (`automap.space.stage_sizes`), and may use the devices in another order
(`automap.space.device_order`). If few numbers of stages divide the devices, the first stage may have fewer devices than
the others.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal

from automap.arrays import Mask
from automap.errors import ProblemError
from automap.price.degrees import sequence_length
from automap.price.lowered_plan import spread
from automap.problem import PAIRED_MICRO_BATCHES, Problem
from automap.space.constraints import Constrained
from automap.space.device_order import Order, device_orders
from automap.space.limits import Limits
from automap.space.shape import Division, MiddleAxis, Shape, divisors
from automap.space.stage_sizes import MAX_UNEVEN_STAGES, part_size, ways_to_fill
from ir.blocks import Blocks
from ir.graph import Graph
from ir.operators.experts import DISPATCH

MIN_TOKENS_A_RANK = 4096
"""Least number of tokens of a sequence on each rank of cp (assumed). With fewer tokens there is too little work to hide
the exchange of keys and values, and there are enough samples to split instead. `hints.fix.cp` has no such limit."""
MAX_VIRTUAL_STAGES = 32
"""Largest number of chunks of a rank (assumed); more only add transfers. Megatron-LM's published runs use up to 20."""
UNEQUAL = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48)
"""Numbers of stages of pipelines whose first stage has fewer devices (assumed). These numbers, or numbers near them,
are used between two successive numbers of equal stages whose ratio is above `FEW_TIMES`."""
FEW_TIMES = 2
"""Largest ratio of two successive numbers of equal stages between which no numbers of unequal stages are used
(assumed)."""
NEAR_ENOUGH = 1.7
"""Largest ratio of a number of `UNEQUAL` to the number that replaces it if samples divide over the stages of the latter
alone (assumed)."""
CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of chunks of a rank in a model with few equal blocks, whose units divide about equally well into any number
of chunks (assumed)."""


def middle_axis(problem: Problem) -> MiddleAxis | None:
    """The third axis of the problem's meshes, or None if no operator would gain from one.

    A graph with experts has `ep`, with degrees that divide the number of experts of some layer. A graph without experts
    whose samples are sequences of 2 * `MIN_TOKENS_A_RANK` tokens or more has `cp`, with degrees that divide the
    sequence and leave at least `MIN_TOKENS_A_RANK` tokens on a rank. `hints.fix.ep` or `hints.fix.cp` chooses the axis
    and its degree; with 1 there is no such axis.

    Raises:
        ProblemError: the degree in `hints.fix` does not divide, or it fixes both axes.
    """
    fix, devices = problem.hints.fix, problem.cluster.num_devices
    experts, tokens = expert_counts(problem.graph), sequence_length(problem.graph) or 0
    asked = {"ep": fix.ep or 1, "cp": fix.cp or 1}
    if min(asked.values()) > 1:
        raise ProblemError(
            "a mesh has one axis between dp and tp",
            field="hints.fix",
            value=asked,
            repair="Leave out ep or cp; on either axis any operator may split experts, batch or sequence.",
        )
    possible = {
        "ep": [d for d in divisors(devices) if any(count % d == 0 for count in experts)],
        "cp": [d for d in divisors(devices) if tokens and tokens % d == 0],
    }
    names: tuple[Literal["ep", "cp"], ...] = ("ep", "cp")
    for name in names:
        if asked[name] > 1:
            if asked[name] not in possible[name]:
                raise _not_divided(problem, name, asked[name], possible[name])
            return MiddleAxis(name=name, degrees=(asked[name],))
    possible["cp"] = [d for d in possible["cp"] if tokens // d >= MIN_TOKENS_A_RANK]
    target = problem.target
    known = {"ep": target is None or "expert" in target.parallel, "cp": target is None or "context" in target.parallel}
    for name, is_free in zip(names, (fix.ep is None, fix.cp is None), strict=True):
        if is_free and known[name] and len(possible[name]) > 1:
            return MiddleAxis(name=name, degrees=tuple(possible[name]))
    return None


def _not_divided(problem: Problem, name: Literal["ep", "cp"], degree: int, possible: Sequence[int]) -> ProblemError:
    """The error for a degree of `hints.fix` that does not divide, with those that do."""
    if name == "ep":
        kind, whole, count = "experts", "the experts of a layer", ", ".join(map(str, expert_counts(problem.graph)))
    else:
        kind, whole, count = "sequence", "the tokens of a sample", str(sequence_length(problem.graph) or "")
    return ProblemError(
        f"must divide the {problem.cluster.num_devices} devices and {whole}, {count}"
        if count
        else f"the model has no {kind}",
        field=f"hints.fix.{name}",
        value=degree,
        repair=f"Use one of {', '.join(map(str, possible))}." if count else "Leave it out.",
    )


def expert_counts(graph: Graph) -> list[int]:
    """The distinct numbers of experts that layers have, ascending."""
    found = {f.size for op in graph if op.kind == DISPATCH for f in op.rule.factors if f.name == "e"}
    return sorted(found)


class Meshes:
    """The shapes of a problem's plans.

    Attributes:
        middle: the third axis, or None.
        shapes: all shapes that obey the hints; their samples divide evenly where possible.
        divisions: the possible divisions of the devices into stages, ascending.
        degrees, middles, micro_batches, virtuals: the other numbers that shapes are made of, ascending.
        devices: number of devices of the cluster.
        orders: the orders in which stages may go through the devices.
        part: devices of a part, the unit in which sizes of unlike stages are counted.
        longest: stages of the longest pipeline whose stages may differ; 0 where none may.
    """

    def __init__(self, problem: Problem, blocks: Blocks, constrained: Constrained, limits: Limits) -> None:
        """Finds the shapes.

        Raises:
            ProblemError: the batch and the devices, or the hints, leave no plan.
        """
        self.problem = problem
        self.constrained = constrained
        self.num_units = len(blocks.units)
        self.num_blocks = blocks.num_blocks if 2 * blocks.num_blocks > self.num_units else 0
        self.middle = middle_axis(problem)
        self.degrees = divisors(problem.cluster.num_devices)
        self.micro_batches = divisors(problem.training.global_batch)
        self.middles = list(self.middle.degrees) if self.middle else [1]
        self.devices = problem.cluster.num_devices
        self.divisions = self._divisions()
        legal = [shape for shape in self._find() if limits.shapes(shape)]
        paired = [shape for shape in legal if problem.pairs(shape.pp, shape.virtual, shape.num_micro_batches)]
        self.shapes = self._as_fixed(paired)
        if not self.shapes:
            self._refuse(alone=bool(legal))
        self.virtuals = sorted({shape.virtual for shape in self.shapes})
        self.orders: tuple[Order, ...] = device_orders(problem.cluster)[: 1 if self.alike else None]
        self.part = part_size(problem.cluster)
        self.longest = max((shape.pp for shape in self.shapes if self.may_differ(shape)), default=0)

    @property
    def alike(self) -> bool:
        """Whether the target needs all pipeline ranks to be alike, see `automap.targets.Target`."""
        target = self.problem.target
        return target is not None and target.alike

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh axes, outermost first."""
        return ("dp", "tp") if self.middle is None else ("dp", self.middle.name, "tp")

    def mesh(self, shape: Shape) -> tuple[int, ...]:
        """[axes] ranks of each mesh axis."""
        return self.mesh_of(shape.size, shape.tp, shape.middle)

    def is_even(self, shape: Shape) -> bool:
        """Whether the stages have equally many devices, unless slots decide other sizes."""
        return shape.pp * shape.size == self.devices

    def has_equal(self, pp: int, inner: int) -> bool:
        """Whether stages with inner axes of this size can have equally many devices.

        If they can, they do, unless slots decide other sizes.
        """
        return self.devices % (pp * inner) == 0

    def division(self, shape: Shape) -> int:
        """Number of the division of a shape."""
        return self.divisions.index(Division(shape.pp, shape.size))

    def sizes(self, shape: Shape) -> tuple[int, ...]:
        """[stages] devices of each stage, unless slots decide other sizes."""
        return (self.devices - (shape.pp - 1) * shape.size, *(shape.size,) * (shape.pp - 1))

    def mesh_of(self, devices: int, tp: int, middle: int) -> tuple[int, ...]:
        """[axes] ranks of each mesh axis of a stage with this number of devices."""
        return (devices // tp, tp) if self.middle is None else (devices // tp // middle, middle, tp)

    def num_orders(self, pp: int) -> int:
        """Number of orders of the devices for a pipeline of `pp` stages; a single stage has one order."""
        return len(self.orders) if pp > 1 or self.problem.cluster.bandwidth_GBps is not None else 1

    def may_differ(self, shape: Shape) -> bool:
        """Whether stages of the shape may have unlike numbers of devices."""
        is_short = self.is_even(shape) and 1 < shape.pp <= MAX_UNEVEN_STAGES and shape.virtual == 1
        shares = shape.dp > 1 and shape.samples > shape.dp
        return is_short and shares and self.may_be_unlike and shape.size % self.part == 0

    @property
    def may_be_unlike(self) -> bool:
        """Whether target and hints allow stages of unlike size."""
        return not self.alike and self.problem.hints.fix.dp is None

    @functools.cached_property
    def fills(self) -> Mask:
        """See `ways_to_fill`."""
        return ways_to_fill(
            self.problem.cluster,
            self.degrees,
            self.middles,
            [self.problem.training.global_batch // count for count in self.micro_batches],
            splits_batch=self.splits_batch,
        )

    @property
    def splits_batch(self) -> bool:
        """Whether most operators split the batch over the middle axis; over ep all operators but experts do."""
        return self.middle is not None and self.middle.name == "ep"

    def _divisions(self) -> tuple[Division, ...]:
        """The divisions into equal stages and, if these have few numbers of stages, some with a smaller first stage.

        If the hints fix a number of stages that does not divide the devices, its most even division is used. The number
        of devices of the stages after the first one is such that the samples of a micro-batch divide over them, if the
        batch allows it. Equal stages that share a host do not count as a number of equal stages here.
        """
        pp = self.problem.hints.fix.pp
        found = {count: Division(count, self.devices // count) for count in self.degrees}
        gaps = _gaps(self.degrees)
        if not self.may_be_unlike:
            return tuple(found.values())
        host = max(host.num_devices for host in self.problem.cluster.hosts)
        inner, batch = [tp for tp in self.degrees if tp <= host], divisors(self.problem.training.global_batch)
        whole = sorted({tp * ranks for tp in inner for ranks in batch if ranks > 1})
        if pp is not None and self.devices % pp:
            some = self._unequal(whole, pp, pp) or self._unequal(range(2, self.devices), pp, pp)
            found |= {one.stages: one for one in some[:1]}
        for few, more in gaps if pp is None else ():
            between = self._unequal(whole, few + 1, more - 1)
            for wanted in UNEQUAL:
                if few < wanted < more:
                    near = _nearest(between, wanted)
                    near = near or self._unequal([max(2, -(-self.devices // wanted))], few + 1, more - 1)
                    found = {one.stages: one for one in near[:1]} | found
        return tuple(sorted({*found.values(), *self._of_whole_hosts(whole)}))

    def _of_whole_hosts(self, sizes: Sequence[int]) -> list[Division]:
        """Divisions into stages of whole hosts whose first stage has fewer hosts, if few divisions are equal.

        Seven hosts divide into 1 or 7 equal stages of whole hosts. If each has four devices, there are also 2 or 4
        equal stages, but these share a host, whose devices then cannot be an inner axis.

        Args:
            sizes: devices of a stage over which micro-batches can be spread, ascending.
        """
        hosts = [host.num_devices for host in self.problem.cluster.hosts]
        if len(set(hosts)) > 1 or hosts[0] == 1:
            return []
        found = []
        for few, more in _gaps(divisors(len(hosts))):
            between = self._unequal([size for size in sizes if size % hosts[0] == 0], few + 1, more - 1)
            found += [one for wanted in UNEQUAL if few < wanted < more for one in _nearest(between, wanted)[:1]]
        return found

    def _unequal(self, sizes: Iterable[int], least: int, most: int) -> list[Division]:
        """Divisions in which all stages but the first one have the same size, out of some sizes.

        Args:
            sizes: numbers of devices of these stages.
            least, most: smallest and largest number of stages.
        """
        found = [Division(-(-self.devices // size), size) for size in sizes if size < self.devices]
        return [
            one for one in found if least <= one.stages <= min(most, self.num_units) and self.devices % one.size != 0
        ]

    def _find(self) -> tuple[Shape, ...]:
        fix, devices = self.problem.hints.fix, self.problem.cluster.num_devices
        batch = self.problem.training.global_batch
        found = []
        for pp, size in self.divisions:
            if pp > self.num_units or fix.pp not in (None, pp):
                continue
            first = devices - (pp - 1) * size
            for tp in self.degrees:
                if size % tp or fix.tp not in (None, tp) or not self.constrained.allows(pp, tp):
                    continue
                for middle in self.middles:
                    dp = size // tp // middle
                    if size // tp % middle or fix.dp not in (None, dp) or first % (tp * middle):
                        continue
                    if first < size and self.has_equal(pp, tp * middle):
                        continue
                    for count in self._counts(dp, first // (tp * middle), middle if self.splits_batch else 1):
                        if fix.num_micro_batches not in (None, count):
                            continue
                        found += [
                            Shape(
                                pp=pp,
                                tp=tp,
                                dp=dp,
                                num_micro_batches=count,
                                samples=batch // count,
                                virtual=virtual,
                                middle=middle,
                            )
                            for virtual in self._virtuals(pp, count, may_be_several=first == size)
                        ]
        return tuple(found)

    def _as_fixed(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """The shapes that have replicas for a fixed ZeRO stage, if there are any; else all shapes."""
        sharded = [shape for shape in shapes if shape.replicas > 1] if self.problem.hints.fix.zero else []
        return tuple(sharded or shapes)

    def _counts(self, dp: int, first: int, inner: int) -> list[int]:
        """Numbers of micro-batches whose samples divide evenly over dp and then over `inner`; if there are none, those
        that give each rank of dp at least one sample, divided as evenly as possible.

        Args:
            dp: ranks of the outermost axis, but for the first stage.
            first: ranks of the outermost axis in the first stage.
            inner: ranks over which the samples of each of these ranks must divide.
        """
        samples = {count: self.problem.training.global_batch // count for count in self.micro_batches}
        even = [count for count, mine in samples.items() if mine % (dp * inner) == 0]
        found = even or [n for n, mine in samples.items() if mine >= dp and spread(mine, dp) // dp % inner == 0]
        return [count for count in found if spread(samples[count], first) // first % inner == 0]

    def _virtuals(self, pp: int, num_micro_batches: int, *, may_be_several: bool) -> list[int]:
        """Numbers of chunks of a rank: that of the hints; else divisors of the blocks of the largest rank, or `CHUNKS`
        if few blocks are equal."""
        fix = self.problem.hints.fix
        if not may_be_several or self.constrained.stages or fix.schedule not in (None, "interleaved"):
            return [1] if fix.virtual_stages in (None, 1) else []
        if fix.virtual_stages is None:
            each = -(-self.num_blocks // pp)
            wanted = [v for v in divisors(each) if v <= MAX_VIRTUAL_STAGES] if self.num_blocks else list(CHUNKS)
        else:
            wanted = [fix.virtual_stages]
        most = self.num_units // pp if pp > 1 and num_micro_batches % pp == 0 else 1
        return [v for v in wanted if v <= most]

    # -- shapes as values ----------------------------------------------------------------------------------------

    def values(self, shape: Shape) -> tuple[int, ...]:
        """The values that decide `shape`: of pp, tp, the middle axis if there is one, micro-batches, virtual stages."""
        inner = (self.division(shape), self.degrees.index(shape.tp))
        outer = (self.micro_batches.index(shape.num_micro_batches), self.virtuals.index(shape.virtual))
        return (*inner, *outer) if self.middle is None else (*inner, self.middles.index(shape.middle), *outer)

    def shape(self, values: Sequence[int]) -> Shape:
        """The shape that the first values decide."""
        (pp, size), tp = self.divisions[values[0]], self.degrees[values[1]]
        middle = 1 if self.middle is None else self.middles[values[2]]
        at = 2 if self.middle is None else 3
        count = self.micro_batches[values[at]]
        return Shape(
            pp=pp,
            tp=tp,
            dp=size // tp // middle,
            num_micro_batches=count,
            samples=self.problem.training.global_batch // count,
            virtual=self.virtuals[values[at + 1]],
            middle=middle,
        )

    # -- refusals ------------------------------------------------------------------------------------------------

    def _refuse(self, *, alone: bool) -> None:
        """Raises the error for no shapes; `alone`: whether there are some whose passes cannot run in pairs."""
        if alone:
            raise ProblemError(
                "no plan of this batch and these hints has enough micro-batches",
                field="training.overlap_expert_exchange",
                value=True,
                repair=f"Leave it out, or let each rank have {PAIRED_MICRO_BATCHES} samples or more, and several times "
                "as many with pipelines, which need virtual stages.",
            )
        devices, batch = self.problem.cluster.num_devices, self.problem.training.global_batch
        self.constrained.explain(self.degrees)
        pp = self.problem.hints.fix.pp
        if pp is not None and pp > self.num_units:
            raise ProblemError(
                f"the model can be cut into {self.num_units} stages at most",
                field="hints.fix.pp",
                value=pp,
                repair=f"Use at most {self.num_units} stages, which `automap inspect` counts as units.",
            )
        counts = sorted({one.stages for one in self.divisions if one.stages <= self.num_units})
        if pp is not None and pp not in counts:
            raise ProblemError(
                f"{devices} devices have no pipelines with this number of stages",
                field="hints.fix.pp",
                value=pp,
                repair=f"Use one of {', '.join(map(str, counts))}.",
            )
        names = ("dp", "cp", "ep", "tp", "pp", "num_micro_batches", "virtual_stages", "schedule")
        fixed = {name: getattr(self.problem.hints.fix, name) for name in names}
        named = {k: v for k, v in fixed.items() if v is not None}
        if named.get("virtual_stages", 1) > 1:
            raise ProblemError(
                "no plan has this number of virtual stages",
                field="hints.fix.virtual_stages",
                value=named["virtual_stages"],
                repair="Virtual stages need a pp of 2 or more, micro-batches that are a multiple of pp, a unit "
                "for each of them, the schedule interleaved, and no constraint on stages: leave out one of "
                + ", ".join(f"{name} {value}" for name, value in named.items())
                + (" or the constraints." if self.constrained.stages else "."),
            )
        if named and self.constrained.stages:
            raise ProblemError(
                "constraints on stages and these decisions together leave no plan",
                field="hints.fix",
                value=named,
                repair="Give as many pipeline stages (pp) as the constraints name, or leave one of them out.",
            )
        if named:
            raise ProblemError(
                f"no plan on {devices} devices with a global batch of {batch} obeys these together",
                field="hints.fix",
                value=named,
                repair="Make dp * cp * ep * tp * pp the number of devices and the global batch a multiple of "
                "dp * ep * num_micro_batches, or leave one of them out.",
            )
        raise ProblemError(
            "the samples of the batch cannot be divided among the devices",
            field="training.global_batch",
            value=batch,
            repair=f"Use a multiple of a divisor of {devices}.",
        )


def _gaps(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of successive numbers, of an ascending sequence, whose ratio is above `FEW_TIMES`."""
    return [(few, more) for few, more in itertools.pairwise(numbers) if more > FEW_TIMES * few]


def _nearest(divisions: Iterable[Division], wanted: int) -> list[Division]:
    """The divisions into about the wanted number of stages (`NEAR_ENOUGH`), the nearest first."""
    near = [one for one in divisions if max(one.stages / wanted, wanted / one.stages) <= NEAR_ENOUGH]
    return sorted(near, key=lambda one: (abs(math.log(one.stages / wanted)), one.size))
