"""What freezing the weights under adapters saves: the best plan of Llama-7B with LoRA, all trained and adapters alone.

    python benchmarks/frozen_parameters.py [--budget 1000] [--layers 32]

Exports Llama-7B of transformers with adapters of rank 16 (LoRA, arXiv 2106.09685) at queries and values, and searches
for 64 samples of 4,096 tokens on eight A100 with the trainer `torchtitan`. Prints the step time and the memory of the
best plan for both cases, and the memory of the first plan where only the adapters are trained. Needs the extra `hf` of
the project. The committed figures are in benchmarks/results/.
"""

import argparse

import torch
from torch import nn

from agents import Budget, search_offer
from automap.amounts import in_seconds
from automap.price.estimate import price
from automap.problem import Problem
from automap.runtime.torch_export import export_onnx
from ir.onnx.sandbox import import_model
from service.report import GIB

RANK, TOKENS, SAMPLES, CLUSTER = 16, 4096, 64, "8xA100-80GB"
ADAPTERS_ALONE = ["*", "!*lora*"]
"""Patterns of `training.frozen`: everything is frozen but the adapters."""


class Adapter(nn.Module):
    """A linear layer with a product of two small matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_b = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return self.base(x) + self.lora_b(self.lora_a(x))


def llama(layers: int) -> nn.Module:
    """Llama-7B of transformers with adapters at queries and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, max_position_embeddings=TOKENS))
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
    return model


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="1000", help="budget of each search")
    parser.add_argument("--layers", type=int, default=32, help="layers of the model")
    arguments = parser.parse_args()
    graph = import_model(export_onnx(lambda: llama(arguments.layers)))
    problems, plans = {}, {}
    for case, frozen in (("all trained", []), ("adapters alone", ADAPTERS_ALONE)):
        training = {"global_batch": SAMPLES, "trainer": "torchtitan", "frozen": frozen}
        problems[case] = problem = Problem.build(graph, CLUSTER, training)
        plans[case] = plan = search_offer(problem, Budget.parse(arguments.budget)).plan
        trained = sum(t.num_elements for t in problem.graph.parameters if not t.frozen)
        most = max(memory.total for memory in plan.estimate.memory_bytes)
        time = in_seconds(plan.estimate.step_time_s)
        print(f"{case}: {trained / 1e6:,.1f} M of {graph.num_parameters / 1e6:,.1f} M parameters, ", end="")
        print(f"{time} a step, {most / GIB:.1f} GiB a device", flush=True)
    again = price(problems["adapters alone"], plans["all trained"])
    most = max(memory.total for memory in again.memory_bytes)
    print(
        f"the first plan where adapters alone are trained: {in_seconds(again.step_time_s)} a step, {most / GIB:.1f} GiB"
    )


if __name__ == "__main__":
    main()
