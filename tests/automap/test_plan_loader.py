"""The loader that is exported for plain PyTorch, on real processes: its losses are those of one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import loader_ranks
import numpy as np
import pytest
import torch
import transformers
from returning_ranks import returned

from automap.cluster import parse_cluster
from automap.export import plan_loader, plan_stages
from automap.export.export import export, save
from automap.price.estimate import annotate
from automap.problem import Problem
from automap.space.target_limits import plan_space
from ir import zoo

WANTED = {
    "replicas": {"data": 2, "zero": 0},
    "ZeRO 2": {"data": 2, "zero": 2},
    "ZeRO 3": {"data": 2, "zero": 3},
    "split weights": {"tensor": 2},
    "stages": {"pipeline": 2, "virtual_stages": 1},
    "interleaved stages": {"pipeline": 2, "virtual_stages": 2},
}
"""Name of a case -> degrees of its plan."""


def save_plan(folder: Path, **degrees: int) -> None:
    """Exports the first random plan that has these degrees."""
    training = {"global_batch": loader_ranks.BATCH, "target": "pytorch", "precision": "fp32"}
    problem = Problem.build(zoo.build(loader_ranks.MODEL), parse_cluster("2xcpu"), training)
    space = plan_space(problem)
    for values in space.random_batch(np.random.default_rng(0), 100).tolist():
        plan = annotate(space.decode(values), space.lowered(values), space.evaluator)
        if all(getattr(plan.degrees[0], key) == value for key, value in degrees.items()):
            return save(export(plan, problem, "pytorch"), folder)
    raise AssertionError(degrees)


def cut(model: torch.nn.Module, paths: list[list[str]], x: torch.Tensor) -> list[torch.nn.Module]:
    """The stages of a model that takes one input."""
    inputs = [{"name": "x", "shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}]
    return plan_stages.cut(model, paths, inputs, torch.device("cpu"), loader_ranks.loss_of)[0]


@pytest.mark.slow
def test_what_does_not_fit_the_plan_is_refused(tmp_path: Path) -> None:
    """Every process refuses it before it waits for another one."""
    plan, small = tmp_path / "plan", tmp_path / "small"
    save_plan(plan, tensor=2)
    document = json.loads((plan / "pytorch.json").read_text())
    document["mesh"]["shape"] = [1 for _ in document["mesh"]["shape"]]
    small.mkdir()
    (small / "pytorch.json").write_text(json.dumps(document))
    for few, code, bias, weight, processes in returned(loader_ranks.refusals, 2, tmp_path, plan, small):
        assert few.startswith("input 0: 5 samples, where each of the 1 replicas takes 8 of the 8")
        assert "drop_last=True" in few
        assert code.startswith("module h.0.attn: does not run on the part of its layers that each of 2 ranks has: ")
        line = next(text for text in Path(loader_ranks.__file__).read_text().splitlines() if ".split(SIZES" in text)
        assert "loader_ranks.py:" in code and line.strip() in code and "chunk(3, dim=-1)" in code
        assert "num_heads by 2" in code
        assert bias.startswith("model.h.1.attn.c_proj.bias: process 0 has (16,), sum ") and "1 has absent" in bias
        assert weight.startswith("model.h.2.mlp.c_fc.weight: ") and "torch.manual_seed" in weight
        assert processes == "the plan is for 1 processes, and torchrun started 2; start 1"


@pytest.mark.slow
def test_processes_that_split_layers_draw_alike_and_others_do_not(tmp_path: Path) -> None:
    """Dropout of what two ranks hold whole must be the same, and that of other samples and layers must not."""
    cases = {"replicas": {"data": 2, "zero": 0}, "weights": {"tensor": 2}, "stages": {"pipeline": 2}}
    for name, degrees in cases.items():
        save_plan(tmp_path / "plans" / name, **degrees)
    one, two = returned(loader_ranks.numbers, 2, tmp_path, tmp_path / "plans")
    for generator in range(3):
        alike = {name: one[name][generator] == two[name][generator] for name in cases}
        assert alike == {"replicas": False, "weights": True, "stages": False}


@pytest.mark.slow
def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    training = {"global_batch": loader_ranks.BATCH, "target": "pytorch", "precision": "fp32"}
    problem = Problem.build(zoo.build(loader_ranks.MODEL), parse_cluster("2xcpu"), training)
    space = plan_space(problem)
    saved = set()
    for values in space.random_batch(np.random.default_rng(0), 400).tolist():
        if saved == WANTED.keys():
            break
        plan = annotate(space.decode(values), space.lowered(values), space.evaluator)
        for name, degrees in WANTED.items():
            fits = all(getattr(plan.degrees[0], key) == value for key, value in degrees.items())
            if fits and name not in saved and plan.num_micro_batches > 1:
                save(export(plan, problem, "pytorch"), tmp_path / name)
                saved.add(name)
    assert saved == WANTED.keys()
    for name in WANTED:
        shutil.copytree(tmp_path / name, tmp_path / f"{name}{loader_ranks.FROZEN}")
    shutil.copytree(tmp_path / "split weights", tmp_path / (transposed := f"split weights{loader_ranks.TRANSPOSED}"))
    cases = [*(f"{name}{end}" for name in WANTED for end in ("", loader_ranks.FROZEN)), transposed]
    wanted = {case: loader_ranks.losses_of_one(case) for case in cases}
    assert all(abs(losses[-1] - losses[0]) > 0.1 for losses in wanted.values())
    for found in loader_ranks.run_ranks(2, tmp_path, cases):
        for name, losses in zip(cases, found, strict=True):
            assert not isinstance(losses, str), f"{name}: {losses}"
            assert losses == pytest.approx(wanted[name], rel=1e-5), name


def test_fused_weights_are_shared_out_piece_by_piece() -> None:
    # Queries and keys of two ranks: each gets half of both.
    assert plan_loader.interleaved([4, 4], 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert plan_loader.interleaved([4, 2, 2], 2).tolist() == [0, 1, 4, 6, 2, 3, 5, 7]


def test_a_model_is_cut_between_its_modules() -> None:
    model, (ids, _) = loader_ranks.build(), loader_ranks.batch()
    stages = cut(model, [["wte", "wpe", "h.0"], ["h.1"], ["h.2", "h.3", "ln_f", "lm_head"]], ids)
    passed = stages[0](ids)
    for stage in stages[1:]:
        passed = stage(passed, ids)
    torch.testing.assert_close(passed, model(ids))
    assert {name for name, _ in stages[1].named_parameters()} == {
        name for name, _ in model.named_parameters() if name.startswith("h.1.")
    }


def test_what_crosses_between_stages_and_its_gradient_are_contiguous() -> None:
    """Torch sends nothing else."""

    class Turn(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.transpose(1, 2)

    class Turned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.turn, self.back = torch.nn.Linear(4, 4), Turn(), Turn()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.back(self.turn(self.first(x)))
            return y

    model, x = Turned(), torch.randn(2, 3, 4)
    first, second = cut(model, [["first", "turn"], ["back"]], x)
    crossing = first(x)
    assert crossing.is_contiguous()
    scores = second(crossing, x)
    torch.testing.assert_close(scores, model(x))
    (gradient,) = torch.autograd.grad(scores, crossing, torch.randn(2, 3, 4))
    assert gradient.is_contiguous()


def test_layers_without_code_of_their_own_are_cut_and_not_computed_again() -> None:
    class Listed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = torch.nn.ModuleList(
                torch.nn.ModuleDict(
                    {"norm": torch.nn.LayerNorm(4), "act": torch.nn.GELU(), "up": torch.nn.Linear(4, 4)}
                )
                for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.h:
                x = x + layer["act"](layer["up"](layer["norm"](x)))
            return x

    model, x = Listed(), torch.randn(2, 4)
    first, second = cut(model, [["h.0"], ["h.1"]], x)
    torch.testing.assert_close(second(first(x), x), model(x))
    assert {name for name, _ in second.named_parameters()} == {n for n, _ in model.named_parameters() if "h.1." in n}
    assert plan_loader.called_parts(model.h[0]) == [model.h[0]["norm"], model.h[0]["up"]]
    modules = dict(model.named_modules())
    plan_loader.check_recomputed(modules, ["h.0.up"])
    with pytest.raises(ValueError, match=r"Write h\.1 as a module with a forward, .*hints\.fix\.recompute none"):
        plan_loader.check_recomputed(modules, ["h.0.up", "h.1"])


def test_a_model_without_the_modules_of_the_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch.json").write_text(
        '{"layers": ["h.0"], "recompute": [], "stages": [[]], "tensor_parallel": {"h.*.mlp.up": {}}}'
    )
    with pytest.raises(ValueError, match=r"no module h\.\*\.mlp\.up of pytorch\.json"):
        plan_loader.Training(loader_ranks.build(), loader_ranks.loss_of, tmp_path)


def test_models_of_transformers_are_cut() -> None:
    """Their code asks for shapes and dtypes, and their scores are a field of the result."""
    config = transformers.GPT2Config(
        n_layer=2, n_embd=8, n_head=2, vocab_size=16, n_positions=4, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.arange(6).view(2, 3)
    parts = [f"transformer.{part}" for part in ("wte", "wpe", "h.0", "h.1", "ln_f")]
    paths = [parts[:3], [*parts[3:], "lm_head"]]
    inputs = [{"name": "input_ids", "shape": [2, 3], "dtype": "int64"}]
    (first, second), of_stage = plan_stages.cut(model, paths, inputs, torch.device("cpu"), lambda out, _: out.logits)
    torch.testing.assert_close(of_stage(second(first(ids), ids), ids), model(ids).logits)
    model.config.use_cache = True
    with pytest.raises(ValueError, match=r"transformer\.h\.0 takes an object of DynamicCache, and .*use_cache = False"):
        cut(model, paths, ids)


def test_a_model_whose_code_asks_for_values_is_refused() -> None:
    class Branching(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.first(x) if x.sum() > 0 else self.second(x)
            return y

    with pytest.raises(ValueError, match=r"cannot be cut into stages: .*hints\.fix\.pp 1"):
        cut(Branching(), [["first"], ["second"]], torch.ones(2, 4))
