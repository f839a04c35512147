"""Scripts as teams write them, read without being run: what is read is what the trainer gets where bash runs them."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from automap.errors import PlanError
from automap.export.reading import read_configuration
from automap.export.stated import Stated

MEGATRON = r"""#!/bin/bash
#SBATCH --job-name=llama70b
#SBATCH --nodes=8
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
# Ask the platform team before you change degrees.
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
ROOT=~/checkpoints/llama; DATA=~/data
TP=${TP:-8}
PP=${PP:-4}
GBS=$((8 * 16 * 4))
GPT_ARGS=(
    # the model
    --num-layers 80 --hidden-size 8192 --num-attention-heads 64
    --seq-length 4096
    --micro-batch-size 1    # more does not fit
    --global-batch-size ${GBS}
    --bf16
)
PARALLEL=(--{tensor,pipeline}-model-parallel-size=4 --tensor-model-parallel-size $TP --sequence-parallel
          --use-distributed-optimizer --num-layers-per-virtual-pipeline-stage 5)
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
srun --nodes=$SLURM_NNODES --ntasks-per-node=1 bash -c "
torchrun --nnodes=$SLURM_NNODES --nproc-per-node=$SLURM_GPUS_PER_NODE --rdzv-endpoint $HEAD:29500 \
  pretrain_gpt.py ${GPT_ARGS[*]} ${PARALLEL[*]} --data-path ${DATA}/{train,valid}.bin --save ${ROOT}/{1..3} \
  --overlap-grad-reduce"
"""
"""Slurm starts one torchrun on each host, which starts the processes."""
STEPS = r"""#!/bin/bash
#SBATCH -N 16
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:h100:8
# A part of the job's hosts trains, the others evaluate.
ARGS="--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 256"
ARGS+=" --num-layers 32 --fp16 --recompute-activations"
srun -N 8 --ntasks=64 --ntasks-per-node=8 --cpu-bind=none python -u pretrain_gpt.py $ARGS --save ~/runs/a
"""
"""Slurm starts the processes, fewer than the job has."""
DEEPSPEED = r"""#!/bin/bash
ZERO=2
GLOBAL=512
MICRO=4
cat > ds_config.json <<EOT
{
  "train_batch_size": $GLOBAL,
  "train_micro_batch_size_per_gpu": $MICRO,
  "zero_optimization": {"stage": $ZERO},
  "bf16": {"enabled": true}
}
EOT
deepspeed --num_nodes 2 --num_gpus 8 --hostfile hosts pretrain_gpt.py \
    --tensor-model-parallel-size 2 --num-layers 32 --micro-batch-size $MICRO --global-batch-size $GLOBAL --bf16 \
    --deepspeed --deepspeed_config=ds_config.json
"""
"""Megatron-DeepSpeed, whose stage of ZeRO stands in a file that the script writes."""
LAUNCHERS = {
    "torchrun": ("--nnodes", "--nproc-per-node"),
    "srun": ("--none", "--ntasks"),
    "deepspeed": ("--num_nodes", "--num_gpus"),
}
"""Launcher -> its options for hosts and for the processes of one."""


def read(text: str, tmp_path: Path) -> Stated:
    path = tmp_path / "train.slurm"
    path.write_text(text)
    return read_configuration(path)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(("text", "launcher"), [(MEGATRON, "torchrun"), (STEPS, "srun"), (DEEPSPEED, "deepspeed")])
def test_a_script_is_read_as_bash_runs_it(text: str, launcher: str, tmp_path: Path) -> None:
    """Programs that print their arguments stand in place of the launchers; argparse reads what they print."""
    for name in ("torchrun", "srun", "deepspeed", "scontrol"):
        stub = 'printf "%s\\n" "$@" > given'
        if name == "srun" != launcher:
            stub = 'while [ "$1" != bash ]; do shift; done; exec "$@"'
        (tmp_path / name).write_text(f"#!/bin/sh\n{stub}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "8", "SLURM_GPUS_PER_NODE": "8", "SLURM_JOB_NODELIST": "n[1-8]"}
    subprocess.run(
        ["bash", "-c", text], cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/h", **slurm}, check=True
    )
    parser = argparse.ArgumentParser(allow_abbrev=False)
    hosts, each = LAUNCHERS[launcher]
    for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size"):
        parser.add_argument(f"--{name}", type=int, default=1)
    for name in ("global-batch-size", "num-layers"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument(hosts, type=int, default=1, dest="hosts")
    parser.add_argument(each, type=int, dest="each")
    words = (tmp_path / "given").read_text().splitlines()
    said, _ = parser.parse_known_args(words)
    found = read(text, tmp_path)
    tp, pp = said.tensor_model_parallel_size, said.pipeline_model_parallel_size
    assert (found.degrees["tp"], found.degrees.get("pp", 1)) == (tp, pp)
    assert found.degrees["micro_batch"] == said.micro_batch_size
    assert found.degrees["dp"] == said.hosts * said.each // (tp * pp)
    assert (found.training["global_batch"], found.num_layers) == (said.global_batch_size, said.num_layers)
    assert found.training["precision"] == ("bf16" if "--bf16" in words else "fp16")


def test_gradients_in_fp32_are_said_to_be_priced_in_bf16(tmp_path: Path) -> None:
    command = "torchrun --nproc-per-node 8 pretrain_gpt.py --micro-batch-size 2 --global-batch-size 16"
    (said,) = read(f"{command} --bf16", tmp_path).remarks
    assert "--grad-reduce-in-bf16" in said and "2 bytes more for each parameter" in said
    for precision in ("--bf16 --grad-reduce-in-bf16", "--fp16", ""):
        assert read(f"{command} {precision}", tmp_path).remarks == ()


def test_the_stage_of_zero_is_that_of_the_file_that_the_script_writes(tmp_path: Path) -> None:
    assert read(DEEPSPEED, tmp_path).degrees["zero"] == 2
    assert read(DEEPSPEED, tmp_path).remarks == ()
    command = DEEPSPEED.partition("\ndeepspeed")[2].replace("--deepspeed ", "--deepspeed --zero-stage 1 ")
    elsewhere = f"MICRO=4 GLOBAL=512\ndeepspeed{command}"
    (said,) = read(elsewhere, tmp_path).remarks
    assert said.startswith("ds_config.json is not read, as no ds_config.json lies beside the script")
    for wrong, field in (
        (DEEPSPEED.replace("--deepspeed ", "--deepspeed --zero-stage 3 "), "--zero-stage"),
        (DEEPSPEED.replace('gpu": $MICRO', 'gpu": 2'), "--micro-batch-size"),
        (DEEPSPEED.replace('"stage": $ZERO', '"stage": 2, "offload_optimizer": {"device": "cpu"}'),
         "zero_optimization.offload_optimizer"),
    ):  # fmt: skip
        with pytest.raises(PlanError) as fault:
            read(wrong, tmp_path)
        assert fault.value.field == f"from.{field}"


def test_a_file_of_deepspeed_beside_a_script_is_read_as_if_the_script_wrote_it(tmp_path: Path) -> None:
    settings, rest = DEEPSPEED.split("cat > ds_config.json <<EOT\n")
    written, command = rest.split("EOT\n")
    written = written.replace("$GLOBAL", "512").replace("$MICRO", "4").replace("$ZERO", "2")
    whole, alone = read(DEEPSPEED, tmp_path), settings + command
    for name in ("ds_config.json", "conf/ds_config.json", "$(dirname $0)/ds_config.json", "${HERE}/ds_config.json"):
        (tmp_path / "ds_config.json").write_text(written)
        found = read(alone.replace("=ds_config.json", f"={name}"), tmp_path)
        assert (found.degrees, found.training, found.remarks) == (whole.degrees, whole.training, ())
        assert found.beside == "ds_config.json" and not [name for name in found.ignored if "deepspeed" in name]


def test_a_file_of_deepspeed_beside_a_script_is_refused_by_its_name(tmp_path: Path) -> None:
    text = "deepspeed a.py --tensor-model-parallel-size 2 --deepspeed --deepspeed_config ds.json --micro-batch-size 4"
    for document, field in (
        ('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
         "ds.json.zero_optimization.offload_optimizer"),
        ('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2}', "--micro-batch-size"),
        ("[]", "ds.json"),
        ("what", "ds.json"),
    ):  # fmt: skip
        (tmp_path / "ds.json").write_text(document)
        with pytest.raises(PlanError) as fault:
            read(text, tmp_path)
        assert fault.value.field == f"from.{field}"


@pytest.mark.parametrize(
    ("text", "file"),
    [
        (
            'CONFIG=${CONFIG:-"./configs/llama3_70b.toml"}\ntorchrun --nproc_per_node=${NGPU:-8} --role rank --tee 3 '
            "-m torchtitan.train --job.config_file ${CONFIG} --parallelism.tensor_parallel_degree 8\n",
            "./configs/llama3_70b.toml",
        ),
        (
            '#SBATCH --nodes=2\nLAUNCH="accelerate launch --config_file fsdp.yaml --num_processes $((2 * 8))"\n'
            "srun $LAUNCH train.py --gradient_accumulation_steps 8\n",
            "fsdp.yaml",
        ),
        ("composer -n 8 train.py yamls/mpt-7b.yaml global_train_batch_size=1024\n", "yamls/mpt-7b.yaml"),
        ("srun python train.py --config-name=gpt.yaml model.tensor_model_parallel_size=8\n", "gpt.yaml"),
    ],
)
def test_a_script_of_another_trainer_is_refused_with_the_name_of_its_file(text: str, file: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no arguments of Megatron-LM") as fault:
        read(text, tmp_path)
    assert f"that it starts, {file}," in fault.value.repair


def test_a_command_in_an_option_of_sbatch_is_read(tmp_path: Path) -> None:
    text = 'sbatch -N 4 --wrap="srun python a.py --tensor-model-parallel-size 4 --bf16"'
    assert read(text, tmp_path).degrees["tp"] == 4
