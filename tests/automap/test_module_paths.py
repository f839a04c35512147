"""Modules that sum at their end, and code around them, under targets that split whole modules."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import Tensor, nn

from automap.cluster import parse_cluster
from automap.errors import ProblemError
from automap.export.configuration import read_run
from automap.export.export import export
from automap.export.module_paths import layer_paths, recomputed_paths, split_modules, stage_paths
from automap.export.plan_stages import cut
from automap.export.stated import layers_of_stages, recomputes
from automap.price.estimate import annotate
from automap.problem import Problem
from automap.runtime.torch_export import export_onnx
from automap.space.target_limits import plan_space
from automap.targets import find_target
from automap.verify import verify
from ir.factors import BROADCAST, PARTIAL
from ir.linkage import link
from ir.onnx.load import load_model

HIDDEN, HEADS, LENGTH, WORDS = 16, 4, 8, 64


class Norm(nn.Module):
    """A norm that exporters write as single operators, as Gemma's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class Words(nn.Embedding):
    """An embedding that scales what it looks up."""

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids) * 4.5


class Layer(nn.Module):
    """Attention and a perceptron, with norms between their last products and the residual sums."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)
        self.before, self.behind, self.last = Norm(), Norm(), Norm()

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (
            part(y).view(y.shape[0], LENGTH, -1, HIDDEN // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(y.shape[0], LENGTH, -1)
        x = x + self.behind(self.o(made))
        return x + self.last(self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = Words(WORDS, HIDDEN), nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def bert() -> nn.Module:
    """An encoder with norms behind the residual sums."""
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "intermediate_size": 4 * HIDDEN}
    config = transformers.BertConfig(**sizes, num_hidden_layers=4, vocab_size=WORDS, max_position_embeddings=LENGTH)
    return transformers.BertForMaskedLM(config)


class Filled(nn.Module):
    """Writes what it computes into a tensor of zeros, one for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.zeros(x.shape[0], 2 * LENGTH, HIDDEN, device=x.device)
        made[:, :LENGTH] = self.inner(x)
        return self.head(made)


def problem_of(module: Callable[[], nn.Module], inputs: Tensor) -> Problem:
    graph = load_model(export_onnx(lambda: (module(), inputs)))
    return Problem.build(graph, parse_cluster("2xcpu"), {"global_batch": 8, "target": "pytorch", "precision": "fp32"})


def test_a_sum_that_a_norm_takes_whole_is_passed_on_by_nothing_beside_it() -> None:
    graph = problem_of(Model, torch.zeros(2, LENGTH, dtype=torch.int64)).graph
    found = link(graph)
    for unit in found.blocks.units:
        linkage = found.types[unit.type]
        for group in linkage.groups:
            for row in group.assignment:
                read: dict[str, set[int]] = {}
                for member, number in zip(group.members, row, strict=True):
                    op = graph.operators[unit.start + member]
                    if member != group.leader:
                        for name, placement in zip(op.inputs, linkage.signatures[member][number].inputs, strict=True):
                            read.setdefault(name, set()).add(placement)
                assert not any({BROADCAST, PARTIAL} <= placements for placements in read.values()), group


def test_a_scaled_embedding_and_norms_behind_split_products_are_exported() -> None:
    problem = problem_of(Model, torch.zeros(2, LENGTH, dtype=torch.int64))
    space, target, found = plan_space(problem), find_target("pytorch"), 0
    assert target is not None
    for values in space.random_batch(np.random.default_rng(0), 60).tolist():
        plan = annotate(space.decode(values), space.lowered(values), space.evaluator)
        if plan.degrees[0].tensor == 2:
            split = split_modules(read_run(plan, problem, target))
            assert split["words"].style == "RowwiseParallel"
            assert split["layers.1.q"].style == "ColwiseParallel" and split["layers.1.o"].style == "RowwiseParallel"
            assert not any(path.endswith(("before", "behind", "last")) for path in split)
            found += 1
    assert found


def test_a_constant_that_is_repeated_for_each_sample_is_no_weight() -> None:
    problem = problem_of(Filled, torch.zeros(2, LENGTH, HIDDEN))
    space = plan_space(problem)
    for values in space.random_batch(np.random.default_rng(0), 20).tolist():
        assert not verify(problem, space.decode(values))


class Again(Model):
    """One layer is called in front of each of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.again = Layer()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(self.again(x))
        return self.head(x)


def test_a_unit_of_several_layers_is_computed_again_by_those_that_are_as_a_whole() -> None:
    problem = problem_of(Again, torch.zeros(1, LENGTH, dtype=torch.int64))
    space = plan_space(problem)
    found = set()
    for values in space.random_batch(np.random.default_rng(0), 32).tolist():
        plan = annotate(space.decode(values), space.lowered(values), space.evaluator)
        found.add(recomputed_paths(read_run(plan, problem, find_target("pytorch"))))
    assert {frozenset(paths) for paths in found} == {
        frozenset(), frozenset({"again", "layers.0", "layers.1", "layers.2"}),
    }  # fmt: skip


def test_layers_with_norms_behind_them_are_computed_again_as_modules_that_the_stages_call() -> None:
    """Their units begin with the norm of the layer before."""
    problem = problem_of(bert, torch.zeros(2, LENGTH, dtype=torch.int64))
    space, found = plan_space(problem), set[tuple[bool, bool]]()
    products = {op.scope for op in problem.graph if op.kind == "MatMul" and ".layer." in op.scope}
    for values in space.random_batch(np.random.default_rng(0), 40).tolist():
        plan = annotate(space.decode(values), space.lowered(values), space.evaluator)
        run = read_run(plan, problem, find_target("pytorch"))
        again, stages, layers = recomputed_paths(run), stage_paths(run), layer_paths(run)
        found.add((len(stages) > 1, bool(again)))
        if again:
            assert all(any(f"{scope}.".startswith(f"{path}.") for path in again) for scope in products)
            assert recomputes("recompute", again, layers) == "full"
        if len(stages) == 1:
            assert again in ((), layers)
            continue
        inputs = [{"name": "input_ids", "shape": [2, LENGTH], "dtype": "int64"}]
        parts, _ = cut(bert(), stages, inputs, torch.device("cpu"), lambda out, _: out.logits)
        called = [{str(node.target) for node in part.graph.nodes if node.op == "call_module"} for part in parts]
        runs = set[str]().union(*called)
        assert all(any(f"{path}.".startswith(f"{other}.") for other in runs) for path in again)
        # A layer counts where the products of its attention are.
        queries = [f"{layer}.attention.self.query." for layer in layers]
        counts = [sum(any(query.startswith(f"{path}.") for path in mine) for query in queries) for mine in called]
        assert layers_of_stages(layers, stages) == tuple(counts) and sum(counts) == 4
    assert found == {(False, False), (False, True), (True, False), (True, True)}


@pytest.mark.parametrize("layers", [2, 3])
def test_a_head_larger_than_all_layers_leaves_no_plan_that_cannot_be_exported(layers: int) -> None:
    """Of two decoder layers, whose units are unlike, the products of one stay whole, so that none is split."""
    config = transformers.BartConfig(
        d_model=HIDDEN, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=2048,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    graph = load_model(export_onnx(lambda: transformers.BartForConditionalGeneration(config)))
    training = {"global_batch": 8, "target": "pytorch", "precision": "fp32"}
    problem = Problem.build(graph, parse_cluster("2xcpu"), training, {"fix": {"tp": 2}})
    if layers == 2:
        with pytest.raises(ProblemError, match=r"hints\.fix\.tp: .* no plan of this model"):
            plan_space(problem)
        return
    space = plan_space(problem)
    for values in space.random_batch(np.random.default_rng(0), 4).tolist():
        plan = annotate(space.decode(values), space.lowered(values), space.evaluator)
        assert not verify(problem, plan) and export(plan, problem, "pytorch").files
