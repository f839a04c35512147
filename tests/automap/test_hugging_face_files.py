"""accelerate's YAML and DeepSpeed's JSON, as people write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from automap.errors import PlanError
from automap.export.reading import read_configuration
from automap.export.stated import Stated

EMPTY = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: 'NO'
fsdp_config: {}
tpu_env: []
commands: null
"""
DEEPSPEED = """
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 4
  offload_optimizer_device: none
  zero_stage: 3
mixed_precision: bf16
num_processes: 8
"""
MEGATRON = """
distributed_type: MEGATRON_LM
megatron_lm_config:
  megatron_lm_tp_degree: 2
  megatron_lm_pp_degree: 2
  megatron_lm_num_micro_batches: 4
  megatron_lm_sequence_parallelism: true
  megatron_lm_use_distributed_optimizer: true
  megatron_lm_recompute_activations: false
mixed_precision: bf16
num_processes: 8
"""
FSDP = "distributed_type: FSDP\nfsdp_config:\n  "


NEMO = "trainer:\n  devices: 8\n  num_nodes: 4\nmodel:\n  tensor_model_parallel_size: 8\n"
FOUNDRY = "max_seq_len: 2048\nmodel:\n  n_layers: 32\nfsdp_config:\n  sharding_strategy: FULL_SHARD\n"
ARGUMENTS = "output_dir: out\nper_device_train_batch_size: 4\nbf16: true\n"


def read(tmp_path: Path, given: Any) -> Stated:
    path = tmp_path / ("a.yaml" if isinstance(given, str) else "a.json")
    path.write_text(given if isinstance(given, str) else json.dumps(given))
    return read_configuration(path)


@pytest.mark.parametrize(
    ("given", "target", "degrees", "ignored"),
    [
        (EMPTY, "accelerate", {"zero": 0}, ()),
        (DEEPSPEED, "deepspeed", {"zero": 3, "dp": 8}, ("gradient_accumulation_steps",)),
        (
            MEGATRON,
            "megatron-core",
            {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True, "zero": 1},
            ("megatron_lm_num_micro_batches",),
        ),
        (f"{FSDP}fsdp_reshard_after_forward: SHARD_GRAD_OP", "accelerate", {"zero": 2}, ()),
        (
            "distributed_type: MULTI_GPU\ndynamo_config:\n  dynamo_backend: INDUCTOR",
            "accelerate",
            {},
            ("dynamo_config",),
        ),
        ({"expert_parallel": {"enabled": True, "autoep_size": 8}}, "deepspeed", {"ep": 8}, ()),
        ({"zero_optimization": {"stage": 3, "zenflow": {"topk": 1}}}, "deepspeed", {}, ("zero_optimization.zenflow",)),
        ({"optimizer": {"type": "Lamb"}}, "deepspeed", {}, ("optimizer.type Lamb",)),
    ],
)
def test_what_people_write(given: Any, target: str, degrees: Any, ignored: tuple[str, ...], tmp_path: Path) -> None:
    found = read(tmp_path, given)
    assert found.target == target and degrees.items() <= found.degrees.items()
    assert found.ignored == ignored


def test_an_old_name_of_bf16(tmp_path: Path) -> None:
    assert read(tmp_path, {"bfloat16": {"enabled": True}}).training["precision"] == "bf16"
    assert read(tmp_path, DEEPSPEED).training["precision"] == "bf16"
    assert read(tmp_path, MEGATRON).training["precision"] == "bf16"
    assert read(tmp_path, "distributed_type: 'NO'\nfp16: true").training["precision"] == "fp16"


@pytest.mark.parametrize(
    ("given", "field", "repair"),
    [
        (f"{FSDP}fsdp_offload_params: true", "fsdp_config.fsdp_offload_params", "false"),
        (f"{FSDP}fsdp_sharding_strategy: HYBRID_SHARD", "fsdp_config.fsdp_sharding_strategy", "FULL_SHARD"),
        (DEEPSPEED.replace("device: none", "device: cpu"), "deepspeed_config.offload_optimizer_device", "none"),
        (DEEPSPEED.replace("stage: 3", "stage: 5"), "deepspeed_config.zero_stage", "0, 1, 2, 3"),
        (DEEPSPEED.replace("zero_stage: 3", "deepspeed_config_file: none.json"),
         "deepspeed_config.deepspeed_config_file", "Put none.json beside it"),
        (MEGATRON.replace("processes: 8", "processes: 6"), "num_processes", "Start a multiple of 4"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "zero_optimization.cpu_offload", "Leave"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "zero_optimization.zero_hpz_partition_size",
         "all replicas"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, "zero_optimization.mics_shard_size", "all"),
        ({"bf16": {"enabled": True}, "sequence_parallel_size": 4}, "sequence_parallel_size", "Leave"),
        # Files of NeMo, LLM Foundry and transformers had the price of plain replicas in fp32.
        (NEMO, "trainer", "--tp 8"),
        (FOUNDRY, "max_seq_len", "--tp 8"),
        (ARGUMENTS, "output_dir", "--tp 8"),
        ("tensor_model_parallel_size: 8", "tensor_model_parallel_size", "--tp 8"),
        ("distributed_typ: FSDP", "distributed_typ", "Write distributed_type"),
        ("num_processes: 8", "distributed_type", "accelerate config"),
        ({"train_batch_size": 8, "amp": {"enabled": True}}, "amp.enabled", "bf16"),
    ],
)  # fmt: skip
def test_what_has_no_price_is_refused(given: Any, field: str, repair: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as fault:
        read(tmp_path, given)
    assert fault.value.field == f"from.{field}" and repair in fault.value.repair


FILE = {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 4}
"""What `DEEPSPEED` says, as the file of DeepSpeed that accelerate's YAML can name in its place."""
NAMED = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: conf/ds.json\nnum_processes: 8\n"


def test_a_file_of_deepspeed_that_accelerate_names_says_the_same_as_its_own_words(tmp_path: Path) -> None:
    said = read(tmp_path, DEEPSPEED)
    beside = tmp_path / "ds.json"
    beside.write_text(json.dumps(FILE))
    found = read(tmp_path, NAMED + "mixed_precision: bf16\n")
    assert (found.degrees, found.training) == (said.degrees, said.training)
    assert "read with ds.json beside it" in found.notes
    # The precision of the file counts where the YAML says none.
    beside.write_text(json.dumps({**FILE, "bf16": {"enabled": True}}))
    assert read(tmp_path, NAMED).training == said.training
    beside.write_text(json.dumps({**FILE, "bf16": {"enabled": "auto"}, "fp16": {"enabled": False}}))
    assert read(tmp_path, NAMED).training["precision"] == "fp32"


@pytest.mark.parametrize(
    ("file", "more", "field"),
    [
        ({**FILE, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "",
         "ds.json.zero_optimization.offload_param"),
        ({**FILE, "fp16": {"enabled": True}}, "mixed_precision: bf16\n", "mixed_precision"),
        ({**FILE, "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, "", "num_processes"),
        ({**FILE, "tensor_parallel": {"autotp_size": 3}}, "", "num_processes"),
        ("[]", "", "ds.json"),
        ("{", "", "ds.json"),
    ],
)  # fmt: skip
def test_a_file_beside_accelerates_that_contradicts_it_is_refused(
    file: Any, more: str, field: str, tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text(file if isinstance(file, str) else json.dumps(file))
    with pytest.raises(PlanError) as fault:
        read(tmp_path, NAMED + more)
    assert fault.value.field == f"from.{field}"
