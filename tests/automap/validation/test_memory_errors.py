"""Spreads of the errors of predicted memory: what is drawn is found again, and what is left out is not used."""

import math

import numpy as np
import pytest

from automap.memory_band import margin
from automap.trainers import trainers
from automap.validation.errors_by_group import Predicted
from automap.validation.memory_errors import Peak, left_out, peaks, spreads, upper_spread
from automap.validation.published_runs import Run


def peak(ratio, trainer="megatron-lm", group="one", model="a"):
    return Peak(trainer=trainer, group=group, model=model, predicted=1e9, measured=ratio * 1e9)


def test_the_spread_of_drawn_errors_is_found():
    errors = np.random.default_rng(0).normal(0.0, 0.07, 20_000)
    assert upper_spread([peak(float(np.exp(x))) for x in errors]) == pytest.approx(0.07, rel=0.02)


def test_a_prediction_that_is_too_high_is_no_danger_and_sources_count_alike():
    assert upper_spread([peak(0.5), peak(0.9)]) == 0.0
    once = [peak(1.1), peak(1.2, group="two")]
    more = [*[peak(1.1)] * 9, peak(1.2, group="two")]
    assert upper_spread(once) == pytest.approx(upper_spread(more))
    assert upper_spread(once) == pytest.approx(math.sqrt(math.log(1.1) ** 2 + math.log(1.2) ** 2))


def test_a_trainer_has_no_less_than_all_on_pytorch_and_compilers_count_for_themselves():
    some = [peak(1.02), peak(1.3, "torchtitan-2024", "two"), peak(2.0, "alpa", "three")]
    found = spreads(some)
    pooled = upper_spread(some[:2])
    assert found["megatron-lm"][0] == found["megatron-core"][0] == pooled
    own = upper_spread(some[1:2])
    assert found["torchtitan-2024"][0] == found["torchtitan"][0] == found["generic"][0] == own > pooled
    assert found["alpa"][0] == upper_spread(some[2:]) > found["torchtitan"][0]
    assert found["oneflow"][0] == pooled
    assert set(found) == set(trainers())


def test_a_peak_is_judged_without_its_model():
    some = [peak(1.5, model="large"), peak(1.4, model="large"), peak(1.01), peak(1.02, "torchtitan-2024", "two")]
    without = dict(left_out(some))
    assert without[some[0]] == without[some[1]] == spreads(some[2:])["megatron-lm"][0]
    assert some[0].exceeds(0.95, without[some[0]])
    assert not some[2].exceeds(0.95, without[some[2]])
    assert not some[0].exceeds(0.95, math.log(1.5) / math.log(margin(0.95, 1.0)) * 1.001)


def test_equal_rows_of_a_table_count_once():
    def row(number, measured=70e9, why=None):
        run = Run(
            id=f"r{number}", group="g", stack="somebody's", model={"name": "m"}, cluster={}, strategy={"m": number},
            iteration_s=1.0, peak_memory_bytes=measured,
        )  # fmt: skip
        return Predicted(run=run, peak_memory_bytes=69e9, why=why)

    found = peaks([row(1), row(2), row(3, 71e9), row(4, None), row(5, why="unpriced")])
    assert [p.measured for p in found] == [70e9, 71e9]
    assert found[0].trainer == "generic"
