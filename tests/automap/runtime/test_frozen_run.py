"""Plans of models with frozen parameters, run on four ranks, against one process that trains the others alone."""

import functools

import numpy as np
import pytest
from long_cases import long_but
from runtime_ranks import Case, errors, expert_plan, make_problem, reference, run_ranks

from automap.space.space import PlanSpace
from ir import zoo

SIZES = "hidden=16,heads=4,seq_len=8,vocab_size=24"
MODELS = {
    "tied table": (f"gpt:layers=2,{SIZES}", ("wte*",)),
    "first layers": (f"gpt:layers=4,{SIZES}", ("wte*", "wpe*", "h.[01].*")),
    "all but the table": (f"gpt:layers=2,{SIZES}", ("*", "!wte*")),
    "all but biases": (f"gpt:layers=2,{SIZES}", ("*", "!*bias*")),
    "last layers": (f"llama:layers=4,kv_heads=4,ffn=32,{SIZES}", ("layers.[23].*", "lm_head*", "norm*")),
    "experts": (f"moe:layers=2,kv_heads=2,ffn=32,experts=4,{SIZES}", ("*experts*",)),
}
PLANS = [
    {"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "recompute": "full"}, {"tp": 2, "zero": 3},
    {"tp": 4, "sequence_parallel": True}, {"pp": 2}, {"pp": 2, "zero": 3}, {"pp": 2, "recompute": "full"},
]  # fmt: skip
STEPS = 2


@functools.cache
def problem_of(name):
    spec, patterns = MODELS[name]
    return make_problem(zoo.build(spec), 4, 8, frozen=patterns)


def cases(every, drawn):
    """Expert plans, of each model each `every`-th one, and plans drawn from the space."""
    for number, name in enumerate(MODELS):
        problem = problem_of(name)
        for place, how in enumerate(PLANS):
            if (place + number) % every == 0:
                yield Case(f"{name}, {how}", problem, expert_plan(problem, **how), STEPS)
        space = PlanSpace(problem)
        for i, values in enumerate(space.random_batch(np.random.default_rng(number), drawn).tolist()):
            yield Case(f"{name}, random {i}", problem, space.decode(values), STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("nth", "drawn", "least"), long_but([(6, 1, 15)], [(6, 1, 15), (1, 6, 90)]))
def test_plans_train_what_is_not_frozen_as_one_process_does(nth, drawn, least, tmp_path):
    every = list(cases(nth, drawn))
    wrong = []
    for case, outcomes in zip(every, run_ranks(4, every, tmp_path), strict=True):
        found = errors(case, outcomes, reference(case))
        if not (found["loss"] < 1e-9 and found["gradients"] < 1e-8 and found["trained"] < 1e-6):
            wrong.append(f"{case.name}: {found}")
    assert len(every) >= least
    assert not wrong, "\n".join(wrong)
