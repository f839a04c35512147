"""How probably a plan fits, what is kept free for it, and what the memory of trainers is made of."""

import math

import numpy as np
import pytest

from agents.searcher import Budget, search
from automap.cluster import parse_cluster
from automap.errors import NothingFits, ProblemError
from automap.memory_band import fit_probability, margin
from automap.price.estimate import annotate, estimate_lowered
from automap.price.evaluator import Evaluator
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.space.stated_strategy import Strategy, hand_made
from automap.trainers import trainers
from automap.verify import verify
from ir import zoo
from ir.loss import scores_of_losses

GPT = "gpt:layers=2,hidden=256,heads=4,seq_len=64,vocab_size=4096"
LARGE = "gpt:layers=4,hidden=2048,heads=16,seq_len=256,vocab_size=8192"
SPREADS = (0.01, 0.05, 0.3)
CONFIDENCES = (0.5, 0.6, 0.75, 0.9, 0.95, 0.99, 0.999)


def build(spec=GPT, cluster="4xA100-40GB", hints=None, **training):
    return Problem.build(zoo.build(spec), parse_cluster(cluster), {"global_batch": 32, **training}, hints)


def priced(problem, **degrees):
    evaluator = Evaluator(problem)
    return estimate_lowered(hand_made(evaluator, Strategy(**degrees)), evaluator)


# -- the probability ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", SPREADS)
def test_the_probability_is_that_of_a_normal_error(spread):
    for ratio in (0.5, 0.8, 1.0, 1.1, 3.0):
        normal = 0.5 * (1.0 + math.erf(math.log(ratio) / spread / math.sqrt(2.0)))
        assert fit_probability(1e9, ratio * 1e9, spread) == pytest.approx(normal, abs=1e-12)


@pytest.mark.parametrize("spread", SPREADS)
def test_what_is_kept_free_gives_the_confidence_back(spread):
    margins = [margin(confidence, spread) for confidence in CONFIDENCES]
    assert margins[0] == 1.0
    assert margins == sorted(set(margins))
    for confidence, kept in zip(CONFIDENCES, margins, strict=True):
        assert fit_probability(80e9 / kept, 80e9, spread) == pytest.approx(confidence, abs=1e-9)


def test_as_many_plans_fit_as_the_probability_says():
    """Drawn errors: of plans that are said to fit with a probability, so many do."""
    errors = np.exp(np.random.default_rng(0).normal(0.0, 0.05, 100_000))
    for confidence in (0.5, 0.9, 0.95, 0.99):
        used = 80e9 / margin(confidence, 0.05)
        assert (used * errors <= 80e9).mean() == pytest.approx(confidence, abs=0.005)


def test_without_a_spread_or_room_nothing_is_open():
    assert [fit_probability(used, 2.0, 0.0) for used in (1.0, 2.0, 3.0)] == [1.0, 1.0, 0.0]
    assert (fit_probability(1.0, 0.0, 0.1), fit_probability(0.0, 1.0, 0.1)) == (0.0, 1.0)


# -- the setting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.49, 0.9991, 1, -1.0, math.nan, "high", True, None])
def test_a_confidence_that_is_none_is_named(value):
    with pytest.raises(ProblemError) as caught:
        build(memory_confidence=value)
    assert caught.value.field == "training.memory_confidence"
    assert caught.value.repair


@pytest.mark.parametrize("trainer", ["generic", "megatron-lm"])
def test_a_plan_fits_as_long_as_its_probability_is_no_less_than_what_is_asked_for(trainer):
    """One plan on devices whose memory is taken from it little by little."""
    open_to = build(trainer=trainer, cluster="4xA100-40GB")
    (memory,) = priced(open_to, dp=4).memory_bytes
    probabilities = []
    for share in np.linspace(0.9, 1.25, 6):
        reserve = {"memory_reserve_bytes": memory.capacity - share * memory.total}
        said = []
        for confidence in (0.5, 0.9, 0.99):
            found = priced(build(hints=reserve, trainer=trainer, memory_confidence=confidence), dp=4)
            (own,) = found.memory_bytes
            spread = trainers()[trainer].memory_spread
            assert own.capacity == pytest.approx(share * memory.total)
            assert own.reserve == pytest.approx(own.capacity * (1.0 - 1.0 / margin(confidence, spread)), abs=1.0)
            assert found.overflows == (share < 1.0 and not math.isclose(share, 1.0))
            assert found.fits == (found.fit_probability >= confidence)
            said.append(found.fits)
        assert said == sorted(said, reverse=True), "what fits surely fits less surely too"
        probabilities.append(found.fit_probability)
    assert probabilities == sorted(probabilities)
    assert probabilities[0] < 0.1
    assert probabilities[-1] > 0.99


def filled(spec):
    """The best template, and hints that leave each device hardly more than it needs."""
    found = search(build(spec), Budget(evaluations=64), searcher="expert").plan.estimate
    most = max(memory.total for memory in found.memory_bytes)
    return found, {"memory_reserve_bytes": found.memory_bytes[0].capacity - 1.01 * most}


def test_a_search_keeps_free_what_it_is_asked_for():
    """The fastest plan without a margin fills the device; with one, another is found that fits as surely."""
    fastest, hints = filled(LARGE)
    for confidence in (0.5, 0.95):
        found = search(build(LARGE, hints=hints, memory_confidence=confidence), Budget(evaluations=64)).plan.estimate
        assert found.fit_probability >= confidence
    assert fastest.step_time_s < found.step_time_s


@pytest.mark.slow
def test_less_confidence_is_advised_where_it_helps(monkeypatch):
    monkeypatch.setattr("agents.results.infeasibility_advice.WITHIN_S", 1.5)
    _, hints = filled(GPT)
    with pytest.raises(NothingFits, match="kept free to be sure") as caught:
        search(build(hints=hints), Budget(evaluations=64), searcher="expert")
    change = next(c for c in caught.value.changes if c["field"] == "training.memory_confidence")
    assert change["about"] in caught.value.repair
    least = float(change["value"])
    again = search(build(hints=hints, memory_confidence=least), Budget(evaluations=64), searcher="expert")
    assert again.plan.estimate.step_time_s == change["step_time_s"]
    assert again.plan.estimate.fit_probability >= least


# -- what trainers hold ------------------------------------------------------------------------------------------------


def test_scores_are_found_through_views():
    graph = build().graph
    loss = next(op for op in graph.operators if "Loss" in op.kind)
    scores = scores_of_losses(graph)
    assert loss.inputs[0] in scores and loss.inputs[1] not in scores
    (head,) = (op for op in graph.operators if op.outputs[0] in scores and op.kind == "MatMul")
    assert graph.tensors[head.outputs[0]].num_elements == 64 * 4096


def working_bytes(memory, trainer):
    """What passes need beside what is saved: buffers without what the framework holds and what nothing uses."""
    held = (memory.total - trainer.reserved_GiB * 2**30) / (1.0 + trainer.unused_share)
    return held - memory.parameters - memory.gradients - memory.optimizer - memory.activations


@pytest.mark.parametrize("trainer", ["torchtitan", "megatron-core", "llm-foundry-fsdp"])
def test_a_loss_holds_its_bytes_for_each_score(trainer):
    """128 samples of 64 tokens with 4096 scores each are by far the largest tensor."""
    problem = build(cluster="1xA100-40GB", trainer=trainer, global_batch=128)
    (memory,) = priced(problem, micro_batch=128).memory_bytes
    own = trainers()[trainer]
    working = max(own.loss_bytes * 128 * 64 * 4096, 2 * 2 * 128 * 64 * 1024)
    assert working_bytes(memory, own) == pytest.approx(working)


def test_selective_recomputation_of_torchtitan_keeps_results():
    """A layer keeps what comes in, and of seven products and attention every second product's result and attention's:
    queries, values, the gate and the way down."""
    tokens, hidden, values, ffn = 64 * 64, 256, 128, 704
    activations = []
    for layers in (3, 4):
        spec = f"llama:layers={layers},hidden={hidden},heads=4,kv_heads=2,ffn={ffn},seq_len=64,vocab_size=512"
        problem = build(spec, "1xA100-40GB", trainer="torchtitan", global_batch=64)
        evaluator = Evaluator(problem)
        lowered = hand_made(evaluator, Strategy(micro_batch=64, recompute="selective"))
        plan = annotate(to_plan(lowered, evaluator), lowered, evaluator)
        assert not verify(problem, plan)
        activations.append(plan.estimate.memory_bytes[0].activations)
    assert activations[1] - activations[0] == 2 * tokens * (4 * hidden + values + ffn)


def test_zero_3_of_deepspeed_gathers_no_more_than_it_documents():
    """Two layers of 1.2e9 parameters each: both gathered would be 2.4e9."""
    spec = "gpt:layers=2,hidden=10000,heads=100,seq_len=64,vocab_size=1024"
    buffers = {}
    for trainer in ("deepspeed", "generic"):
        problem = build(spec, "8xA100-80GB", trainer=trainer)
        (memory,) = priced(problem, dp=8, zero=3).memory_bytes
        buffers[trainer] = working_bytes(memory, trainers()[trainer])
    layer = 12 * 10000**2 + 13 * 10000
    more = (2 * layer - 1e9) * 2 + (layer - 1e9) * 4
    assert buffers["generic"] - buffers["deepspeed"] == pytest.approx(more)


def test_trainers_state_how_far_their_memory_is_off():
    for trainer in trainers().values():
        assert 0.0 < trainer.memory_spread < 0.5
        assert {"memory_spread", "loss_bytes", "most_gathered", "crossing_buffers"} <= set(trainer.source)


def test_the_spread_may_be_that_of_the_users_own_cluster():
    cluster = parse_cluster("4xA100-40GB").to_json()
    cluster["constants"] = {"memory_spread": 0.2}
    problem = Problem.build(zoo.build(GPT), parse_cluster(cluster), {"global_batch": 32})
    assert problem.trainer.memory_spread == 0.2
    (memory,) = priced(problem, dp=4).memory_bytes
    assert memory.reserve == pytest.approx(memory.capacity * (1.0 - 1.0 / margin(0.95, 0.2)))
