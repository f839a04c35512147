from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from automap.errors import ProblemError
from automap.space.stated_parts import Unpriced
from automap.validation.errors_by_group import Predicted, by_group, choice_regrets, predict, spearman, summarize, table
from automap.validation.published_cases import case_of
from automap.validation.published_runs import load_runs
from service.command.main import main


def row(**changes: Any) -> dict[str, Any]:
    """A run of a small GPT on one host; `changes` are keys of its sections."""
    document: dict[str, Any] = {
        "id": "r0",
        "group": "made-up",
        "stack": "megatron-deepspeed",
        "model": {
            "name": "GPT-tiny", "layers": 6, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 2048, "vocab_size": 1000,
            "seq_len": 128,
        },
        "cluster": {"gpu": "A100-SXM", "memory_GB": None, "num_gpus": 8, "gpus_per_node": 8, "inter_link": None},
        "strategy": {
            "dp": 2, "tp": 2, "pp": 2, "vpp": 1, "micro_batch": 2, "global_batch": 16, "precision": "fp16",
            "recompute": "full", "zero_stage": 0, "schedule": None,
        },
        "measured": {"iteration_s": 0.1},
    }  # fmt: skip
    for key, value in changes.items():
        if key in document:
            document[key] = value
        else:
            section = next((s for s in ("cluster", "measured", "model") if key in document[s]), "strategy")
            document[section][key] = value
    return document


def runs_of(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(rows))
    return path


def case(tmp_path: Path, **changes: Any) -> Any:
    return case_of(load_runs(runs_of(tmp_path, row(**changes)))[0])


def test_a_run_becomes_its_plan(tmp_path: Path) -> None:
    found = case(tmp_path)
    lowered = found.lowered
    assert lowered.num_micro_batches == 4
    assert lowered.samples == 4
    assert len(lowered.chunks) == len(lowered.layout.stages) == 2
    assert [int(a) for a in lowered.layout.stages[0].axes] == [2, 2]
    assert [sum(bool(s.recomputed.all()) for s in chunk) for chunk in lowered.chunks] == [3, 3]
    assert found.problem.trainer.name == "megatron-deepspeed"
    assert found.assumed == ()


@pytest.mark.parametrize(
    ("stack", "tp", "padded"),
    [
        ("megatron-deepspeed", 2, 1280),
        ("megatron-deepspeed", 1, 1152),
        ("torchtitan", 2, 1100),
        ("torchtitan", 8, 1104),
    ],
)
def test_a_vocabulary_is_padded_as_the_trainer_pads_it(tmp_path: Path, stack: str, tp: int, padded: int) -> None:
    """Megatron: to a multiple of 128 * tp; others: of tp."""
    found = case(tmp_path, stack=stack, vocab_size=1100, tp=tp, dp=8 // tp, pp=1, micro_batch=1, schedule=None)
    table = next(op.inputs[0] for op in found.problem.graph.operators if op.kind == "Gather")
    assert found.problem.graph.tensors[table].shape == (padded, 512)


def test_outer_stages_get_fewer_layers_where_they_do_not_divide(tmp_path: Path) -> None:
    found = case(tmp_path, layers=6, pp=4, dp=1, micro_batch=4)
    kinds = [u.type for u in found.evaluator.blocks.units]
    repeated = max(set(kinds), key=kinds.count)
    assert [sum(kinds[s.unit] == repeated for s in chunk) for chunk in found.lowered.chunks] == [1, 2, 2, 1]


def test_context_parallelism_splits_the_sequence(tmp_path: Path) -> None:
    large = {"hidden": 2048, "heads": 16, "ffn": 8192, "seq_len": 4096}
    whole = case(tmp_path, dp=2, pp=1, tp=2, cp=1, num_gpus=4, gpus_per_node=4, **large)
    split = case(tmp_path, dp=2, pp=1, tp=2, cp=2, **large)
    assert [int(a) for a in split.lowered.layout.stages[0].axes] == [2, 2, 2]
    one, other = (c.evaluator.evaluate(c.lowered) for c in (whole, split))
    assert other.ranks[0].compute_s < one.ranks[0].compute_s


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gpu": "Abacus"}, "no data file for the device Abacus"),
        ({"ep": 4}, "ep = 4"),
        ({"micro_batch": None}, "micro_batch is not stated"),
        ({"global_batch": 15}, "not a multiple"),
        ({"dp": 1}, "is not the number of devices"),
        ({"precision": "int4"}, "the precision int4"),
        ({"schedule": "ZB-9"}, "the schedule ZB-9"),
        ({"hidden": None}, "model.hidden is not stated"),
    ],
)
def test_what_cannot_be_priced_says_why(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(Unpriced, match=why):
        case(tmp_path, **changes)


def test_links_in_words(tmp_path: Path) -> None:
    found = case(tmp_path, num_gpus=8, gpus_per_node=4, inter_link="4x100Gb/s Omni-Path per node")
    node = found.problem.cluster.nodes[0]
    assert (node.count, node.num_devices, node.nics) == (2, 4, 4)
    assert found.problem.cluster.links[node.inter_node_link].bandwidth_GBps == 12.5
    total = case(tmp_path, gpus_per_node=4, inter_link="RoCE 1600 Gbps node-node").problem.cluster
    assert total.nodes[0].nics * total.links[total.nodes[0].inter_node_link].bandwidth_GBps == 200.0


def test_files_are_checked(tmp_path: Path) -> None:
    broken = row()
    broken["measured"]["iteration_s"] = 0
    with pytest.raises(ProblemError, match=r"runs\[0\].measured.iteration_s"):
        load_runs(runs_of(tmp_path, broken))
    with pytest.raises(ProblemError, match=r"runs\[0\].model"):
        load_runs(runs_of(tmp_path, {**row(), "model": None}))
    with pytest.raises(ProblemError, match="cannot be read"):
        load_runs(tmp_path / "none.json")


def predicted(tmp_path: Path, *times: tuple[float, float]) -> list[Predicted]:
    rows = [row(id=f"r{i}", iteration_s=measured) for i, (_, measured) in enumerate(times)]
    return [
        Predicted(run=run, step_time_s=seconds, error_band_s=(0.9 * seconds, 1.1 * seconds), peak_memory_bytes=1.0)
        for run, (seconds, _) in zip(load_runs(runs_of(tmp_path, *rows)), times, strict=True)
    ]


def test_figures_of_a_group(tmp_path: Path) -> None:
    found = summarize(predicted(tmp_path, (1.1, 1.0), (1.8, 2.0), (3.0, 3.0), (8.0, 4.0)))
    assert found["n"] == 4
    assert found["mape"] == pytest.approx((0.1 + 0.1 + 0 + 1) / 4)
    assert found["median"] == pytest.approx(0.1)
    assert found["bias"] == pytest.approx(0.25)
    assert found["spearman"] == pytest.approx(1.0)
    assert found["band_half_width"] == pytest.approx(0.1)
    assert found["band_coverage"] == pytest.approx(0.5)
    assert found["num_choice_groups"] == 1
    assert found["regret_mean"] == 0


def test_regret_is_that_of_the_plan_ranked_first(tmp_path: Path) -> None:
    assert choice_regrets(predicted(tmp_path, (1.0, 3.0), (2.0, 2.0))) == [pytest.approx(0.5)]


def test_measuring_the_first_three_takes_the_fastest_of_them(tmp_path: Path) -> None:
    """Ranked 1, 2, 3, 4 by the price; measured 3.0, 2.5, 2.2 and, the best, 2.0."""
    rows = predicted(tmp_path, (4.0, 2.0), (1.0, 3.0), (3.0, 2.2), (2.0, 2.5))
    assert choice_regrets(rows) == [pytest.approx(0.5)]
    assert choice_regrets(rows, measured=3) == [pytest.approx(0.1)]
    assert choice_regrets(rows, measured=4) == [0.0]
    found = summarize(rows)
    assert found["regret3_mean"] == pytest.approx(0.1)
    assert found["regret3_mean"] <= found["regret_mean"]


def test_the_table_shows_how_well_the_band_holds(tmp_path: Path) -> None:
    header, line, *_ = table({"groups": {"made-up": summarize(predicted(tmp_path, (1.0, 1.05), (2.0, 3.0)))}})
    shown = dict(zip(header.split()[1:9], line.split()[1:9], strict=True))
    assert (shown["inside"], shown["band"]) == ("50.0%", "±10.0%")


def test_rank_correlation_with_ties() -> None:
    assert spearman([1, 2, 2, 4], [1, 3, 3, 9]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    rng = np.random.default_rng(0)
    a, b = rng.random(50), rng.random(50)
    ranks = [np.argsort(np.argsort(x)) for x in (a, b)]
    assert spearman(a.tolist(), b.tolist()) == pytest.approx(np.corrcoef(*ranks)[0, 1])


def test_validate_lists_what_it_could_not_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs_of(tmp_path, row(), row(id="r1", ep=4), row(id="r2", recompute=None))
    document = by_group(map(predict, load_runs(path)))
    group = document["groups"]["made-up"]
    assert (group["n"], group["assumed"]) == (2, 1)
    assert [u["id"] for u in group["unpriced"]] == ["r1"]
    assert main(["validate", str(path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == table(document) and [line.split()[0] for line in printed[:2]] == ["group", "made-up"]
    assert main(["validate", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document
