"""A search says why its target splits no layers of a model."""

from __future__ import annotations

from typing import Any

import pytest

from agents import Budget, search_offer
from automap.errors import ProblemError
from automap.plan import Plan
from automap.problem import Problem
from ir import zoo

SIZES = "layers=2,hidden=64,heads=4,seq_len=32,vocab_size=128"
EXPERTS = f"moe:{SIZES},ffn=64,experts=4"


def plan_of(model: str, target: str, **fix: Any) -> Plan:
    problem = Problem.build(zoo.build(model), "4xA100-80GB", {"global_batch": 16, "target": target}, {"fix": fix})
    return search_offer(problem, Budget.parse(8), searchers=("expert",)).plan


@pytest.mark.parametrize(
    ("model", "target", "said"),
    [
        (EXPERTS, "pytorch", "tensor parallelism: the model has experts"),
        (
            EXPERTS,
            "automap",
            "automap.GroupedMatMul in module layers.0.mlp.experts is in no linear layer, embedding or norm, and would",
        ),
        (f"gpt:{SIZES}", "automap", None),
        (f"gpt:{SIZES}", "any", None),
        ("vgg:convolutions=1,width=8,ffn=16,image_size=8", "automap", None),
    ],
)
def test_a_reason_is_given_for_models_with_attention(model: str, target: str, said: str | None) -> None:
    found = [text for text in plan_of(model, target).warnings if text.startswith("the target")]
    assert [said in text for text in found if said] == [True] * (said is not None)
    assert found or said is None


def test_a_fixed_degree_is_refused_with_the_reason() -> None:
    with pytest.raises(ProblemError, match=r"Use 1, or another target: the model has experts") as refused:
        plan_of(EXPERTS, "pytorch", tp=2)
    assert refused.value.field == "hints.fix.tp"
    with pytest.raises(ProblemError, match=r"or another target: the model has no attention"):
        plan_of("vgg:convolutions=1,width=8,ffn=16,image_size=8", "automap", tp=2)
