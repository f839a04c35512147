"""Plans of one stage on real processes: loss, gradients and optimizer steps of one process; collectives as priced."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from collective_list import list_collectives
from plan_cases import expert, idle, partly, random_plans, uneven
from runtime_ranks import STEPS, difference, errors, programs_of, reference, run_ranks, with_stages

from automap.errors import PlanError
from automap.price.evaluator import Evaluator
from automap.price.plan_reader import lower_plan
from automap.runtime.operators.apply import value_of
from ir.build import GraphBuilder
from ir.factors import BROADCAST, LEAST_PART, PARTIAL


def two_ranks():
    return [
        *(expert(f"dp, ZeRO {zero}", "gpt", 2, zero=zero, steps=STEPS if zero in (1, 3) else 0) for zero in range(4)),
        expert("tp", "gpt", 2, tp=2, steps=STEPS),
        expert("tp, sequence-parallel", "gpt", 2, tp=2, sequence_parallel=True),
        expert("tp, recomputed", "gpt", 2, tp=2, recompute="full", sequence_parallel=True),
        expert("tp, attention recomputed", "gpt", 2, tp=2, recompute="selective"),
        expert("dp, ZeRO 3, recomputed", "gpt", 2, zero=3, recompute="full"),
        partly(expert("tp", "gpt", 2, tp=2, sequence_parallel=True), "wte", "h.0"),
        uneven(expert("dp", "gpt", 2, batch=6, count=1), (2, 1)),
        uneven(expert("dp, ZeRO 1", "gpt", 2, batch=6, count=1, zero=1), (1, 2)),
        expert("tp", "bert", 2, tp=2),
        expert("ep", "moe", 2, middle=2, experts="ep"),
        expert("dropped", "dropout", 2),
        expert("dropped, recomputed", "dropout", 2, recompute="full"),
        expert("dp", "lstm", 2),
        expert("synchronized", "resnet", 2),
        expert("local", "resnet", 2, batch_norm="local"),
        *random_plans("gpt", 2, 1, 0),
        *random_plans("resnet", 2, 1, 1),
    ]


def three_ranks():
    return [
        expert("dp, as even as they go", "gpt", 3, steps=STEPS),
        expert("dp, ZeRO 2, as even as they go", "gpt", 3, count=1, zero=2),
        *random_plans("moe", 3, 1, 4),
    ]


def four_ranks():
    return [
        expert("dp x tp", "gpt", 4, tp=2),
        expert("dp x tp, ZeRO 3, sequence-parallel", "gpt", 4, tp=2, zero=3, sequence_parallel=True),
        uneven(expert("dp x tp", "gpt", 4, batch=6, count=1, tp=2), (1, 2)),
        expert("ep x tp", "moe", 4, tp=2, middle=2, experts="ep"),
        expert("tp4", "odd", 4, tp=4, steps=STEPS),
        expert("dp x tp, ZeRO 3, sequence-parallel", "odd", 4, tp=2, zero=3, sequence_parallel=True),
        *random_plans("odd", 4, 1, 2),
        idle(expert("dp, ZeRO 1", "gpt", 2, zero=1, steps=STEPS), 4),
        *random_plans("gpt", 4, 2, 2),
        *random_plans("bert", 4, 1, 2),
        *random_plans("moe", 4, 1, 3),
    ]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Cases with the outcomes of their ranks; plans of fewer devices run on the first of four processes."""
    cases = [*two_ranks(), *three_ranks(), *four_ranks()]
    found = run_ranks(4, cases, tmp_path_factory.mktemp("ranks"))
    return [(case, outcomes[: case.problem.cluster.num_devices]) for case, outcomes in zip(cases, found, strict=True)]


@pytest.mark.slow
def test_plans_compute_the_step_of_one_process(ran):
    wrong = []
    for case, outcomes in ran:
        if "dropped" not in case.name:
            found = errors(case, outcomes, reference(case))
            if not (found["loss"] < 1e-9 and found["gradients"] < 1e-8 and found["trained"] < 1e-6):
                wrong.append(f"{case.name}: {found}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_recomputation_drops_the_same(ran):
    """Random numbers depend on step, micro-batch, operator and place, not on when they are drawn."""
    once, again = (outcomes[0] for case, outcomes in ran if "dropped" in case.name)
    assert once.loss == again.loss
    assert difference(again.gradients, once.gradients)[1] < 1e-12
    (plain,) = (outcomes[0] for case, outcomes in ran if case.name == "gpt, dp, ZeRO 0")
    assert abs(once.loss - plain.loss) > 1e-3


def sent(outcome, count):
    """Bytes of one micro-batch by place and kind, in float32, recomputation apart."""
    found = Counter()
    for one in outcome.sent:
        if one.operator and one.direction != "recompute":
            found[one.direction, one.operator, one.tensor, one.kind, one.axis] += one.bytes / 2 / count
    return found


def priced(case):
    """Other trainers send tokens to experts over several axes at once; AutoMAP's over one axis after the other."""
    problem = replace(case.problem, training=replace(case.problem.training, trainer="automap"))
    evaluator, found = Evaluator(problem), Counter()
    for one in list_collectives(lower_plan(case.plan, evaluator), evaluator):
        found[one.direction, one.operator, one.tensor, one.kind, one.axis] += one.bytes
    return found


@pytest.mark.slow
def test_the_collectives_that_run_are_those_that_are_priced(ran):
    """Cases are expert plans and random plans of GPT; docs/runtime.md says where the two differ."""
    compared = 0
    for case, outcomes in ran:
        is_odd = "random" in case.name and not case.name.startswith("gpt")
        if is_odd or "local" in case.name or "shares" in case.name:
            continue
        wanted, found = priced(case), sent(outcomes[0], case.plan.num_micro_batches)
        # The price gathers the gradient of positions that ranks use in part; it is summed once a step instead.
        spared = {key for key in wanted if key[0] == "backward" and key[2] == "wpe.gather" and key[3] == "all_gather"}
        assert found.keys() == wanted.keys() - spared, case.name
        for key, amount in found.items():
            # Parts of unlike sizes are priced as equal ones.
            rel = 1.0 / LEAST_PART if case.name.startswith("odd") else 1e-6
            assert amount == pytest.approx(wanted[key], rel=rel), (case.name, key)
        compared += len(found)
    assert compared > 20


@pytest.mark.slow
def test_gradients_and_parameters_are_sent_once(ran):
    """In closed form: every parameter of a data-parallel plan, in float64, padded to whole pieces.

    Under ZeRO 2 and 3 the embedding, which is the head as well, is had once in each of the two units.
    """
    for case, outcomes in ran:
        if not case.name.startswith("gpt, dp, ZeRO") or "shares" in case.name:
            continue
        zero, size = case.plan.stages[0].zero.stage, 8 * case.problem.graph.num_parameters
        size += 8 * case.problem.graph.tensors["wte.weight"].num_elements if zero >= 2 else 0
        kinds = Counter()
        for one in outcomes[0].sent:
            if one.tensor:
                kinds[one.kind, one.direction] += one.bytes
        count = case.plan.num_micro_batches
        updated = {("all_gather", "update"): 8 * case.problem.graph.num_parameters}
        once = {0: {("all_reduce", "forward"): size}, 1: {("reduce_scatter", "forward"): size, **updated}}
        each = {("reduce_scatter", "backward"): count * size}
        again = {("all_gather", "forward"): count * size, ("all_gather", "recompute"): count * size}
        wanted = {**once, 2: {**each, **updated}, 3: {**each, **again}}[zero]
        assert kinds.keys() == wanted.keys(), case.name
        for key, amount in wanted.items():
            # A look-up needs no table in the backward pass.
            least = amount / 2 if key[1] == "recompute" else amount
            assert least <= kinds[key] <= 1.01 * amount, (case.name, key)


@pytest.mark.parametrize(("ranks", "sizes"), [(2, [1026, 1025]), (4, [513, 513, 513, 512]), (3, [684, 684, 683])])
def test_parts_of_unlike_sizes_are_those_of_torch(ranks, sizes):
    """`torch.chunk` and DTensor's `Shard` cut so."""
    case = expert("tp", "odd", ranks, tp=ranks)
    (stage,) = programs_of(case.plan, Evaluator(case.problem))
    boxes = stage.layouts.boxes(case.problem.graph.tensors["wte.weight"], (BROADCAST, 0))
    assert [stop - start for (start, stop), _ in boxes] == sizes
    assert [len(part) for part in torch.arange(2051).chunk(ranks)] == sizes
    assert [start for (start, _), _ in boxes] == [sum(sizes[:i]) for i in range(ranks)]


def test_parts_cover_the_whole_and_routes_end_where_they_should():
    case = uneven(expert("dp x tp", "gpt", 4, batch=6, count=1, tp=2), (1, 2))
    (stage,) = programs_of(case.plan, Evaluator(case.problem))
    tensor = next(t for t in case.problem.graph.tensors.values() if t.shape == (1, 8, 16) and t.batch_dim == 0)
    boxes = stage.layouts.boxes(tensor, (0, 1))
    assert [box[0] for box in boxes] == [(0, 1), (0, 1), (1, 3), (1, 3)]
    assert [box[1] for box in boxes] == [(0, 4), (4, 8), (0, 4), (4, 8)]
    kinds = {
        target: [step.kind for step in stage.layouts.steps(tensor, source, target)]
        for source, target in (((0, 1), (0, -1)), ((0, PARTIAL), (0, 1)), ((0, 1), (0, 2)), ((BROADCAST, 1), (1, -1)))
    }
    assert kinds == {
        (0, -1): ["all_gather"],
        (0, 1): ["reduce_scatter"],
        (0, 2): ["all_to_all"],
        # Cut over the outer axis first it would come to lie in stripes.
        (1, -1): ["all_gather", "slice"],
    }


def test_samples_that_leave_a_rank_without_any_are_refused():
    case = expert("dp x tp", "gpt", 4, tp=2, count=1)
    plan = with_stages(case.plan, batch_shares=(9, 8))
    with pytest.raises(PlanError, match="batch_shares"):
        programs_of(plan, Evaluator(case.problem))


def test_values_of_a_file_and_of_the_graph():
    graph = GraphBuilder()
    graph.input("x", (1, 4))
    for name in ("w#q", "w#k"):
        graph.parameter(name, (4, 3))
    graph.add("MatMul", ["x", "w#q"], ["q"])
    graph.add("MatMul", ["x", "w#k"], ["k"])
    built = replace(graph.finish(["q", "k"]), pieces={"w#q": ("w", 1, 0, 3), "w#k": ("w", 1, 3, 6)})
    whole = torch.arange(24.0).reshape(4, 6)
    pieces = {name: value_of(built, name, {"w": whole}) for name in ("w#q", "w#k")}
    assert torch.equal(pieces["w#k"], whole[:, 3:])
