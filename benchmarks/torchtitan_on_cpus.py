"""torchtitan 0.3.0 on processors, for `train_exports.py`: its `Trainer`, a Llama of any size, batches in memory.

torchtitan takes an accelerator for granted, and torch's releases lack what its default `spmd_backend` and its pipelines
call. What is put in place of these here does not touch what a plan decides.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

RECIPE = "from torchtitan.models.llama3.config_registry import llama3_8b as recipe"
"""The line of an exported module in whose place a user writes their own recipe."""


def recipe(sizes: dict[str, int], batch: tuple[Tensor, Tensor], optimizer: dict[str, Any]) -> Any:
    """A recipe of torchtitan.

    Args:
        sizes: layers, hidden, heads, seq_len, vocab_size and ffn of the Llama.
        batch: inputs and labels of the global batch, which every step trains.
        optimizer: the arguments of AdamW.
    """
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import TrainingConfig
    from torchtitan.trainer import Trainer

    class Tokenizer(BaseTokenizer):
        """None: the batches are numbers."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        encode = decode = get_vocab_size = lambda *_, **__: None

    class Batches(BaseDataLoader):
        """The micro-batches of this replica, again and again."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
            self.pieces = [some.chunk(dp_world_size)[dp_rank].split(local_batch_size) for some in batch]

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                for ids, labels in zip(*self.pieces, strict=True):
                    yield {"input": ids.clone()}, labels.clone()

        state_dict = load_state_dict = lambda *_: {}

    return Trainer.Config(
        model_spec=_model(sizes),
        loss=CrossEntropyLoss.Config(global_vocab_size=sizes["vocab_size"]),
        tokenizer=Tokenizer.Config(),
        dataloader=Batches.Config(),
        optimizer=default_adamw(**optimizer),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        metrics=MetricsProcessor.Config(log_freq=1),
        training=TrainingConfig(seq_len=sizes["seq_len"], disable_cuda_graphs=True),
    )


def _model(sizes: dict[str, int]) -> Any:
    """The specification of a Llama; its attention is torch's, for FlexAttention is compiled."""
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    hidden, words, length = sizes["hidden"], sizes["vocab_size"], sizes["seq_len"]
    rope = llama3.ComplexRoPE.Config(dim=hidden // sizes["heads"], max_seq_len=length, theta=1e4, scaling="none")
    with mock.patch.object(llama3, "get_attention_config", lambda _: ScaledDotProductAttention.Config()):
        layers = llama3._build_llama3_layers(
            n_layers=sizes["layers"], dim=hidden, n_heads=sizes["heads"], hidden_dim=sizes["ffn"], rope=rope,
            attn_backend="",
        )  # fmt: skip
    table = {"num_embeddings": words, "embedding_dim": hidden, "param_init": llama3._EMBEDDING_INIT}
    head = {"in_features": hidden, "out_features": words, "param_init": llama3._output_linear_init(hidden)}
    model = llama3.Llama3Model.Config(
        dim=hidden,
        vocab_size=words,
        tok_embeddings=llama3.Embedding.Config(**table),
        norm=llama3.RMSNorm.Config(normalized_shape=hidden, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(**head),
        layers=layers,
    )
    return llama3.ModelSpec(
        name="llama3", flavor="tiny", model=model, parallelize_fn=llama3.parallelize_llama,
        pipelining_fn=llama3.pipeline_llm, post_optimizer_build_fn=None, state_dict_adapter=None,
    )  # fmt: skip


def whole(config: Any) -> nn.Module:
    """The model of a recipe in one process, which is the same on all processes."""
    torch.manual_seed(0)
    config.model_spec.model.update_from_config(config=config)
    found: nn.Module = config.model_spec.model.build()
    found.init_weights(buffer_device=None)
    return found


def train(folder: Path, make: Callable[[], Any], steps: int) -> list[float]:
    """[steps] losses of the exported module in a folder, with a recipe in place of the one that it names.

    Args:
        folder: the exported files.
        make: makes the recipe.
        steps: number of steps; of pipelines, the processes of the last stage alone know the losses.
    """
    _use_processors()
    file = folder / "torchtitan_plan.py"
    assert RECIPE in file.read_text()
    sys.modules["own_recipe"] = SimpleNamespace(recipe=make)  # type: ignore[assignment]
    scope: dict[str, Any] = {"__name__": "torchtitan_plan"}
    exec(file.read_text().replace(RECIPE, "from own_recipe import recipe"), scope)
    config = scope["plan"]()
    config.parallelism.spmd_backend = "partial_dtensor"  # the only one that runs with a release of torch
    from torchtitan.trainer import Trainer

    trainer = Trainer(config)
    _copy(whole(make()), trainer.model_parts)
    if trainer.parallel_dims.pp_enabled:
        _takes_micro_batches(trainer.pp_schedule)
    found: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *_, **__: found.append(float(loss))
    data = trainer.batch_generator(trainer.dataloader)
    for step in range(1, steps + 1):
        trainer.step = step
        trainer.train_step(data)
    return found


def _use_processors() -> None:
    """Has torchtitan train on processors; afterwards its other modules may be imported."""
    from torchtitan.tools import utils

    answers = dict.fromkeys(("set_device", "reset_peak_memory_stats", "empty_cache", "synchronize"), lambda *_: None)
    memory = SimpleNamespace(total_memory=2**30)
    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        **answers, get_device_name=lambda *_: "processor", current_device=lambda: 0, memory_stats=lambda *_: {},
        get_device_properties=lambda *_: memory,
    )  # fmt: skip
    utils.get_local_device = lambda: torch.device("cpu")


def _copy(source: nn.Module, parts: list[nn.Module]) -> None:
    """Gives the parts of a model the weights of the whole one."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, distribute_tensor

    weights = dict(source.named_parameters())
    for part in parts:
        for name, parameter in part.named_parameters():
            value = weights[name.replace("_checkpoint_wrapped_module.", "")].detach()
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                value = distribute_tensor(value, mesh, placements, src_data_rank=None).to_local()
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().copy_(value)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sums


def _takes_micro_batches(schedule: Any) -> None:
    """Has a schedule of torch 2.13 take the micro-batches one by one, as torchtitan hands them over."""

    def step(*, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, **rest: Any) -> None:
        given = arg_mbs or [()] * len(kwarg_mbs), kwarg_mbs
        with mock.patch.object(schedule, "_split_inputs", lambda *_: given):
            type(schedule).step(schedule, target=torch.cat(target_mbs) if target_mbs else None, **rest)

    schedule.step = step
