"""Forward passes that run together with backward passes, each under the exchanges of experts of the other."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from collective_list import list_collectives

from automap.cluster import parse_cluster
from automap.errors import PlanError, ProblemError
from automap.export.baseline import read_baseline, with_stated
from automap.export.export import export
from automap.price.estimate import annotate
from automap.price.evaluator import Evaluator
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.schedule import write_order
from automap.space.space import PlanSpace
from automap.space.stated_strategy import Strategy, hand_made
from automap.space.target_limits import plan_space
from automap.verify import Verifier
from ir import zoo

MIXTURE = "moe:layers=4,hidden=64,heads=4,kv_heads=2,ffn=128,experts=4,seq_len=32,vocab_size=96"
ON = {"global_batch": 40, "trainer": "megatron-core-26.06", "overlap_expert_exchange": True}
OFF = {**ON, "overlap_expert_exchange": False}
FIELD = "training.overlap_expert_exchange"


def evaluator(training: dict[str, Any], hints: dict[str, Any] | None = None) -> Evaluator:
    return Evaluator(Problem.build(zoo.build(MIXTURE), "4xH100", training, hints))


@pytest.mark.parametrize("trainer", ["megatron-core", "megatron-core-26.06"])
def test_four_fifths_of_the_exchanges_of_experts_hide_and_nothing_else(trainer: str) -> None:
    strategy, seconds = Strategy(ep=2, tp=2, micro_batch=1), {}
    for training in (ON, OFF):
        found = evaluator({**training, "trainer": trainer})
        lowered = hand_made(found, strategy)
        outcome = found.evaluate(lowered)
        seconds[training is ON] = np.array(outcome.ranks[0].comm_s)
        sent = [c.seconds for c in list_collectives(lowered, found) if c.kind == "all_to_all"]
        exchanged = lowered.num_micro_batches * sum(sent)
    gone = seconds[False] - seconds[True]
    assert exchanged > 0.0 and gone.sum() == pytest.approx(0.8 * exchanged)
    assert np.count_nonzero(np.abs(gone) > 1e-12) == 1


@pytest.mark.parametrize(("more", "layers_kept"), [({}, 4), ({"pp": 2, "virtual": 2}, 5)])
def test_one_layer_more_is_in_memory(more: dict[str, int], layers_kept: int) -> None:
    """A model with twice the layers keeps 4 more without a pipeline, and in the pipeline one more for each of the 5
    stages of micro-batches that are in flight on the first rank."""
    held = []
    for layers, training in ((4, ON), (4, OFF), (8, OFF)):
        model = zoo.build(MIXTURE.replace("layers=4", f"layers={layers}").replace("vocab_size=96", "vocab_size=48"))
        found = Evaluator(Problem.build(model, "4xH100", training))
        first = found.evaluate(hand_made(found, Strategy(ep=2, **more))).ranks[0]
        held.append(np.array([first.activation_bytes, first.buffer_bytes]))
    paired, alone, longer = held
    assert (paired - alone).tolist() == [0.0, pytest.approx((longer - alone)[0] / layers_kept)]


def test_what_cannot_overlap_is_refused_by_name() -> None:
    dense = zoo.build("gpt:layers=2,hidden=64,heads=4,seq_len=32,vocab_size=96")
    for training, hints, field in (
        ({"trainer": "torchtitan"}, {}, FIELD),
        ({"trainer": "megatron-core", "target": "deepspeed"}, {}, FIELD),
        ({"precision": "fp32"}, {}, FIELD),
        ({"global_batch": 4}, {}, FIELD),
        ({}, {"recompute": "full"}, "hints.fix.recompute"),
        ({}, {"pp": 2, "virtual_stages": 1}, "hints.fix.virtual_stages"),
        ({}, {"pp": 2, "schedule": "1f1b"}, "hints.fix.schedule"),
        ({"global_batch": 8}, {"pp": 2}, FIELD),
        ({}, {"num_micro_batches": 4}, "hints.fix.num_micro_batches"),
        ({"global_batch": 16}, {"dp": 4}, FIELD),
    ):
        with pytest.raises(ProblemError) as fault:
            PlanSpace(evaluator({**ON, **training}, {"fix": hints}).problem)
        assert fault.value.field == field and fault.value.repair
        PlanSpace(evaluator({**OFF, **training}, {"fix": hints}).problem)
    with pytest.raises(ProblemError, match="no experts") as fault:
        Problem.build(dense, "4xH100", ON)
    assert fault.value.field == FIELD
    for strategy, name in (
        (Strategy(pp=2, ep=2), "virtual"),
        (Strategy(pp=2, ep=2, virtual=2, micro_batch=2), "micro_batch"),
        (Strategy(ep=2, recompute="full"), "recompute"),
        (Strategy(ep=2, micro_batch=5), "micro_batch"),
    ):
        hand_made(evaluator(OFF), strategy)
        with pytest.raises(PlanError, match="overlap_expert_exchange") as refused:
            hand_made(evaluator(ON), strategy)
        assert refused.value.field == name


@pytest.mark.parametrize("target", ["any", "megatron-core"])
def test_the_space_has_the_plans_that_overlap_and_verification_agrees(target: str) -> None:
    """Of plans without the setting, those whose pipelines are interleaved, which run four fifths of their passes in
    pairs, and without full recomputation are in the space with it. Verification finds fault with all others."""
    on, off = (plan_space(evaluator({**training, "target": target}).problem) for training in (ON, OFF))

    def is_paired(pp: int, virtual: int, count: int) -> bool:
        if pp > 1 and virtual == 1:
            return False
        return all(5 * len(pairs(rank, pp, virtual, count)[0]) <= virtual * count for rank in range(pp))

    assert on.shapes == tuple(s for s in off.shapes if is_paired(s.pp, s.virtual, s.num_micro_batches))
    assert {s.pp for s in on.shapes} == {1, 2}
    assert on.modes.tolist() == (off.modes & (np.array(RECOMPUTE_MODES) != "full")).tolist() and off.modes[-1]
    verifier, rng, seen = Verifier(on.problem), np.random.default_rng(0), set()
    for values in on.random_batch(rng, 30):
        lowered = on.lowered(tuple(values.tolist()))
        assert not verifier.violations(annotate(to_plan(lowered, on.evaluator), lowered, on.evaluator))
    for values in off.random_batch(rng, 60):
        lowered = off.lowered(tuple(values.tolist()))
        faults = verifier.violations(to_plan(lowered, off.evaluator), memory=False)
        about = {fault.where.split(".")[-1] for fault in faults if FIELD in fault.what}
        again = any(segment.recomputed.any() for segment in itertools.chain(*lowered.chunks))
        pp = len(lowered.layout.stages)
        shape = pp, len(lowered.chunks) // pp, lowered.num_micro_batches
        want = set() if is_paired(*shape) else {"kind" if pp > 1 == shape[1] else "num_micro_batches"}
        assert about == want | ({"recompute"} if again else set())
        seen |= about
    assert seen == {"kind", "num_micro_batches", "recompute"}


def pairs(rank: int, ranks: int, virtual: int, count: int) -> tuple[list[str], list[tuple[str, str]]]:
    """The forward passes that a rank runs before its first pair, and its pairs of a forward and a backward pass.

    Written from megatron/core/pipeline_parallel/schedules.py of Megatron-Core 0.16: `get_schedule_table` says the stage
    and the micro-batch of a pass, `get_pp_rank_microbatches` how many forward passes come first. Without pipelines:
    `combined_1f1b_schedule_for_no_pipelining`.
    """
    table = [(chunk, n + i) for n in range(0, count, ranks) for chunk in range(virtual) for i in range(ranks)]
    forward = [f"{chunk * ranks + rank}F{m}" for chunk, m in table]
    backward = [f"{(virtual - 1 - chunk) * ranks + rank}B{m}" for chunk, m in table]
    first = min((ranks - rank - 1) * 2 + (virtual - 1) * ranks + 1, len(table))
    return forward[:first], list(zip(forward[first:], backward, strict=False))


@pytest.mark.parametrize(("ranks", "virtual", "count"), [(2, 2, 14), (4, 2, 28), (3, 4, 30)])
def test_pairs_take_the_order_and_on_equal_stages_the_time_of_the_interleaved_schedule(
    ranks: int, virtual: int, count: int
) -> None:
    """A pair takes both of its inputs when it begins, and hands on both of its results when it ends."""
    seconds = {"F": 1.0, "B": 2.0}
    lines = []
    for rank, order in enumerate(write_order("interleaved", ranks, ranks * virtual, count)):
        first, paired = pairs(rank, ranks, virtual, count)
        # Beside a backward pass runs the forward pass that the interleaved schedule runs after it.
        joined = [*first, *(word for forward, backward in paired for word in (backward, forward))]
        assert tuple(joined) == order[: len(joined)]
        lines.append([(word,) for word in first] + paired + [(word,) for word in order[len(joined) :]])
    ends, done = [0.0] * ranks, dict[str, float]()
    while any(lines):
        for rank, line in enumerate(lines):
            while line and all(before in done for word in line[0] for before in needed(word, ranks * virtual)):
                words = line.pop(0)
                ready = [done[before] for word in words for before in needed(word, ranks * virtual)]
                ends[rank] = max([ends[rank], *ready]) + sum(seconds[word.strip("0123456789")] for word in words)
                done |= dict.fromkeys(words, ends[rank])
    assert max(ends) == (virtual * count + ranks - 1) * 3.0


def needed(word: str, chunks: int) -> list[str]:
    """The passes whose results a pass takes."""
    chunk, letter, micro_batch = re.split("([FB])", word)
    others = [(int(chunk) - 1, "F")] if letter == "F" else [(int(chunk), "F"), (int(chunk) + 1, "B")]
    return [f"{c}{which}{micro_batch}" for c, which in others if 0 <= c < chunks]


def test_megatron_gets_the_option_where_it_has_experts_to_exchange() -> None:
    """What is exported is read as the same training and priced alike; without expert parallelism it is refused there,
    and left out."""
    cluster = parse_cluster("4xH100")
    for ep, more in itertools.product((1, 2), ({"tp": 2, "sequence_parallel": True}, {"pp": 2, "virtual": 2})):
        found = evaluator({**ON, "target": "megatron-core"})
        lowered = hand_made(found, Strategy(ep=ep, **more))
        plan = to_plan(lowered, found)
        script = export(plan, found.problem, "megatron-core").files["megatron.sh"]
        assert ("--overlap-moe-expert-parallel-comm\n    --delay-wgrad-compute\n" in script) == (ep > 1)
        assert f"CUDA_DEVICE_MAX_CONNECTIONS={32 if ep > 1 else 1}\n" in script
        assert ("--num-layers-per-virtual-pipeline-stage 1\n" in script) == ("pp" in more)
        hints = {"baseline": {"file": "megatron.sh", "text": script}}
        said = with_stated({}, hints, cluster)
        assert said.get("overlap_expert_exchange", False) == (ep > 1)
        again = read_baseline(Evaluator(Problem.build(zoo.build(MIXTURE), cluster, said, hints)))
        assert again is not None
        step = found.evaluate(lowered).step_time_s
        assert again.plan.estimate.step_time_s == pytest.approx(step, rel=1e-9)


def test_a_script_that_is_priced_otherwise_is_told_so() -> None:
    """What the user says of the option goes before what the script says of it."""
    cluster = parse_cluster("4xH100")
    script = (
        "--expert-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 40 --seq-length 32 --bf16 "
        "--num-layers 4 --overlap-grad-reduce --overlap-moe-expert-parallel-comm"
    )
    pipeline = " --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    for more, given in itertools.product(("", pipeline), (None, False)):
        told = "" if given is None else "give overlap_expert_exchange true"
        hints = {"baseline": {"file": "args.sh", "text": script + more}}
        own = {} if given is None else {"overlap_expert_exchange": given}
        problem = Problem.build(zoo.build(MIXTURE), cluster, {**with_stated({}, hints, cluster), **own}, hints)
        assert problem.training.overlap_expert_exchange == (not told)
        read = read_baseline(Evaluator(problem))
        assert read is not None
        notes = [note for note in read.notes if "exchange" in note]
        assert len(notes) == bool(told) and all(told in note for note in notes)
