"""`automap explain` and `automap diff`: what else a plan could decide, and how two plans differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from automap.amounts import in_seconds
from automap.comparisons import Change
from automap.errors import PlanError, one_of
from automap.records import to_json
from automap.targets import ANY
from service.command.estimation import own_problem, page, read_plan
from service.jobs.run_job import JobRequest
from service.output_files import write_output
from service.priced_plans import priced_anew
from service.report import worth

if TYPE_CHECKING:
    from automap.plan import DeviceMemory, Plan
    from automap.space.alternatives import Alternative


ROUNDING = 1e-9
"""Share of a step by which sums of the same times differ in another order."""


def explain_file(data: bytes, request: JobRequest, path: Path) -> tuple[Plan, tuple[Alternative, ...]]:
    """The plan of a file with a new estimate, and what each of its degrees could be instead.

    The model and the hints come as in `service.command.estimation.price_hand_made`.

    Raises:
        UserError: the file, the model, or that the plan is illegal or for another model.
    """
    from automap.price.estimate import annotate
    from automap.price.evaluator import Evaluator
    from automap.price.plan_reader import lower_plan
    from automap.space.alternatives import alternatives
    from automap.verify import Verifier

    plan = read_plan(path)
    evaluator = Evaluator(own_problem(data, request, plan))
    lowered = lower_plan(plan, evaluator)
    verifier, target = Verifier(evaluator.problem), plan.training.target

    def beyond(one: Plan) -> set[str]:
        return set() if target == ANY else {fault.what for fault in verifier.beyond(one, target)}

    return annotate(plan, lowered, evaluator), alternatives(lowered, evaluator, plan.sync, beyond)


def draw_file(data: bytes, request: JobRequest, path: Path, output: Path, picture: str | None) -> None:
    """Draws the plan of a file; the kind of the output follows from its name.

    Args:
        output: an `.html` page, an `.svg` or `.png` picture, or a `.json` trace.
        picture: name of the picture; None = the timeline.

    Raises:
        UserError: as `explain_file`; or an unknown kind of output, or an unknown picture.
    """
    from automap.price.evaluator import Evaluator
    from service.drawing.charts import check_kind
    from service.drawing.pictures import PICTURES, pictures_of
    from service.drawing.trace import trace

    check_kind(output)
    kind = output.suffix.lower()
    if picture is not None and picture not in PICTURES:
        raise PlanError("unknown picture", field="picture", value=picture, repair=one_of(PICTURES, picture))
    if picture is not None and kind in (".html", ".json"):
        repair = "Leave --picture out, or write an .svg or a .png."
        raise PlanError(f"a {kind} file holds all of it", field="picture", value=picture, repair=repair)
    plan = read_plan(path)
    if picture is not None and picture not in pictures_of(plan):
        repair = f"{one_of(pictures_of(plan), picture)} A search is drawn of a plan that `automap search` has found."
        raise PlanError("no search of this plan is known", field="picture", value=picture, repair=repair)
    plan = priced_anew(plan, Evaluator(own_problem(data, request, plan)), with_timeline=True)
    assert plan.estimate is not None
    assert plan.estimate.timeline is not None
    if kind == ".json":
        write_output(output, json.dumps(trace(plan.model.name, plan.estimate.timeline)) + "\n")
        return
    from service.drawing.page import png, report, svg

    if kind == ".html":
        write_output(output, report(plan))
        return
    figure = PICTURES[picture or "timeline"](plan)
    write_output(output, svg(figure) if kind == ".svg" else png(figure))


def limits(plan: Plan, found: Sequence[Alternative]) -> list[str]:
    """Which bounds are tight: that of the memory of a device, and that of the time of any plan."""
    estimate = plan.estimate
    assert estimate is not None

    def share(row: DeviceMemory) -> float:
        return (row.total + row.reserve) / row.capacity

    fullest = max(estimate.memory_bytes, key=share)
    faster = [one for one in found if one.more_s < 0.0]
    held_back = sum(one.shortage is not None for one in faster)
    some = {0: "every faster choice below fits", 1: "a faster choice below would not fit"}.get(
        held_back, f"{held_back} faster choices below would not fit"
    )
    some = some if faster else "no choice below is faster"
    from automap.plan import devices_in_words

    where = devices_in_words(fullest.devices)
    are = "are" if where.startswith("devices") else "is"
    memory = f"memory: {where} {are} {share(fullest):.0%} full, the part that is kept free included; {some}"
    record = plan.search
    bound_s = record.lower_bound_s if record is not None and record.lower_bound_s is not None else None
    known = estimate.lower_bound_s if bound_s is None else bound_s
    left = max(0.0, 1.0 - known / estimate.step_time_s)
    whose = "of this model on this cluster" if bound_s is None else "that a search can decide"
    return [
        memory,
        f"time: no plan {whose} saves more than {left:.0%} of the step",
    ]


def explanation(plan: Plan, found: Sequence[Alternative]) -> list[str]:
    """The page of the estimate, what limits the plan, and a line for each alternative."""
    lines = [*page(plan), "", *(f"limits    {text}" for text in limits(plan, found)), ""]
    for one in found:
        sign = "+" if one.more_s > 0.0 else "−"
        is_more = abs(one.more_s) > ROUNDING * one.step_time_s
        beside = f"{sign}{in_seconds(abs(one.more_s))}" if is_more else "as fast"
        text = f"{one.about}: {in_seconds(one.step_time_s)} ({beside})"
        lines.append(f"instead   {text}" + ("" if one.shortage is None else f"; does not fit: {one.shortage}"))
    return lines if found else [*lines, "instead   no degrees describe this plan, so none was changed"]


def difference(data: bytes, request: JobRequest, first: Path, second: Path) -> tuple[Plan, Plan, tuple[Change, ...]]:
    """Two plans of one problem with new estimates, and the changes that lead from the first to the second.

    Raises:
        UserError: as `explain_file`; or the plans are for other clusters or trainings.
    """
    from automap.price.evaluator import Evaluator
    from automap.space.changes import changes_of_plans

    plans = [read_plan(path) for path in (first, second)]
    _check_alike(plans[0], plans[1], second)
    evaluator = Evaluator(own_problem(data, request, plans[0]))
    one, other = (priced_anew(plan, evaluator) for plan in plans)
    return one, other, changes_of_plans(one, other, evaluator)


def _check_alike(first: Plan, second: Plan, path: Path) -> None:
    """Refuses two plans whose differences are not their decisions."""
    for name in ("cluster", "training"):
        documents = [to_json(getattr(plan, name)) for plan in (first, second)]
        keys = sorted({*documents[0], *documents[1]} - {"target"})
        for key in keys:
            one, other = (document.get(key) for document in documents)
            # The name of a cluster is not part of it.
            if one != other and key != "name":
                # Devices are long records, each under its name.
                one, other = (", ".join(v) if isinstance(v, dict) else str(v)[:60] for v in (one, other))
                told = f"{other} and not {one}" if one != other else f"{one} with other figures"
                raise PlanError(
                    f"{path.name} has another {name}: {key} {told}",
                    field=f"plan.{name}.{key}",
                    value=other,
                    repair="Compare plans of one cluster and training; `automap sweep` compares others.",
                )


def differences(one: Plan, other: Plan, found: Sequence[Change]) -> list[str]:
    """The step times of two plans, and a line for each change from one to the other."""
    assert one.estimate is not None
    assert other.estimate is not None
    before, after = one.estimate.step_time_s, other.estimate.step_time_s
    lines = [
        f"first     {in_seconds(before)}",
        f"second    {in_seconds(after)}, {before / after:.2f}x the first's speed",
    ]
    for change in found:
        text = worth(change)
        if change.alone_s is not None:
            text += f"; alone {in_seconds(change.alone_s)}"
        if change.without_s is not None:
            text += f"; all others {in_seconds(change.without_s)}"
        lines.append(f"change    {text}")
    return lines
