#!/bin/bash
# A Llama-2 70B as somebody may train it with Megatron-LM on 64 H100s, for `--from` and `--baseline` (docs/exports.md).
ARGS=(
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel
    --num-layers 80 --num-layers-per-virtual-pipeline-stage 5
    --micro-batch-size 1 --global-batch-size 512 --seq-length 4096
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --bf16 --grad-reduce-in-bf16 --lr 1e-4 --make-vocab-size-divisible-by 1
)
torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py "${ARGS[@]}"
