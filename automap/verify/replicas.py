"""Rules about replicas that are averaged periodically: within a step they exchange nothing but the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from automap.plan import Plan
from automap.verify.model import Model
from automap.verify.reading import Chunk, Violation

AVERAGED_BYTES = 4.0
"""The bytes of each parameter in an average: float32, in any precision of the training."""


def check_replicas(plan: Plan, chunks: Sequence[Chunk], model: Model) -> Iterator[Violation]:
    """Checks that the ranks of the first batch axis can take steps without communication, if the plan averages them.

    Args:
        plan: a plan that is sound in structure.
        chunks: its stages, with every operator placed.
        model: the model of the problem.
    """
    if plan.sync.kind == "synchronous":
        return
    axis = plan.stages[0].batch_axes[0] if plan.stages[0].batch_axes else ""
    size = dict(plan.stages[0].mesh).get(axis, 1)
    if size == 1:
        yield Violation("sync.kind", "the first stage has no replicas")
        return
    for number, stage in enumerate(plan.stages):
        if stage.batch_axes[:1] != (axis,) or dict(stage.mesh).get(axis, 1) != size:
            yield Violation(f"stages[{number}].batch_axes", f"not {size} replicas over {axis} first")
            return
        if stage.batch_shares != plan.stages[0].batch_shares:
            yield Violation(f"stages[{number}].batch_shares", "replicas have other samples than in stage 0")
        if stage.zero.stage:
            yield Violation(f"stages[{number}].zero.stage", f"replicas share their state: {plan.sync.kind}")
    home = {index: chunk for chunk in chunks for index in chunk.operators}
    for chunk in chunks:
        for index in chunk.operators:
            what = _tie(home, index, axis, model)
            if what is not None:
                name = model.graph.operators[index].name
                yield Violation(f"{chunk.where}.shardings.{name}", f"replicas are tied: it {what}")


def _tie(home: Mapping[int, Chunk], index: int, axis: str, model: Model) -> str | None:
    """Text about the communication of an operator between replicas; None if there is none."""
    graph, placed = model.graph, home[index].placed[index][axis]
    op = graph.operators[index]
    for name, read in zip(op.inputs, placed.inputs, strict=True):
        if name in model.parametric and read != "B":
            return f"reads {read} of the parameter {name}"
        maker = model.live_maker(name)
        if maker is None:
            continue
        made = home[maker].placed[maker][axis].outputs[graph.operators[maker].outputs.index(name)]
        if made != read:
            return f"reads {read} of {name}, which is made as {made}"
    if graph.outputs[-1] in op.outputs and placed.outputs[0] != "P":
        return "makes a loss that is not a sum over replicas"
    number = model.legal(index)[placed]
    exchange = None if number is None else op.rule.factors[number].collective
    is_local = exchange is not None and exchange.name == "batch_norm" and model.problem.training.batch_norm == "local"
    return None if exchange is None or is_local else f"exchanges inside ({exchange.name})"


def held_bytes(plan: Plan, gradient: float) -> float:
    """The memory for averaging, bytes for each parameter.

    Args:
        plan: any plan.
        gradient: the bytes of a gradient, whose memory is free when local SGD averages.
    """
    if plan.sync.kind == "synchronous":
        return 0.0
    if plan.sync.kind == "local_sgd":
        return max(0.0, AVERAGED_BYTES - gradient)
    # The average under way, and for a corrected merge the parameters that were sent.
    return AVERAGED_BYTES + (AVERAGED_BYTES if plan.sync.merge == "corrected" else 0.0)
