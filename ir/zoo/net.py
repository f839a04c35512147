"""`Net`: builds graphs from PyTorch-like modules, with the names, operators and order of an exported model."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ir.build import GraphBuilder
from ir.canonical import canonical
from ir.graph import Graph, Tensor
from ir.loss import with_loss
from ir.operators.experts import BALANCED_LOAD, COMBINE, DISPATCH, PRODUCT
from ir.parameters import split_fused

OPSET = 23
"""The first operator set with RMSNormalization and RotaryEmbedding."""
LOWEST = -3.4028234663852886e38
"""Number that masks add to the scores of masked positions: the lowest float32."""


class Net:
    """A graph under construction. Methods take and return names of tensors; shapes are those of one sample."""

    def __init__(self) -> None:
        self.builder = GraphBuilder()

    def shape(self, x: str) -> tuple[int, ...]:
        """Shape of a tensor at one sample."""
        return self.builder.tensors[x].shape

    def op(self, kind: str, inputs: Sequence[str], scope: str = "", **attributes: Any) -> str:
        """Adds one operator and returns its first result."""
        return self.ops(kind, inputs, scope, 1, **attributes)[0]

    def ops(self, kind: str, inputs: Sequence[str], scope: str, num_outputs: int, **attributes: Any) -> tuple[str, ...]:
        """Adds one operator and returns all its results."""
        base = f"{scope}.{kind.lower()}" if scope else kind.lower()
        outputs = [self.builder.unique(base) for _ in range(num_outputs)]
        return self.builder.add(
            kind, inputs, outputs, scope=scope, name="" if scope else kind, attributes=attributes, opset=OPSET
        )

    def parameter(self, name: str, *shape: int) -> str:
        """A parameter, which is added to the graph on its first use."""
        return name if name in self.builder.tensors else self.builder.parameter(name, shape)

    def buffer(self, name: str, *shape: int, dtype: str = "float32") -> str:
        """A buffer: a tensor of the model that is not trained."""
        if name not in self.builder.tensors:
            self.builder.add_tensor(Tensor(name=name, shape=shape, dtype=dtype, role="buffer"))
        return name

    def scalar(self, name: str, value: float) -> str:
        """A constant number."""
        return self.builder.constant(name, np.array(value, dtype=np.float32))

    def add(self, x: str, y: str, scope: str = "") -> str:
        """`x + y`."""
        return self.op("Add", [x, y], scope)

    def linear(self, x: str, scope: str, out: int, *, bias: bool = True) -> str:
        """`torch.nn.Linear`."""
        width = self.shape(x)[-1]
        weight = self.parameter(f"{scope}.weight", out, width)
        x = self.product(x, weight, scope)
        return self.add(x, self.parameter(f"{scope}.bias", out), scope) if bias else x

    def product(self, x: str, weight: str, scope: str) -> str:
        """`x @ weight.T`, with the operators of an exported model: Gemm for matrices."""
        if len(self.shape(x)) == 2:
            return self.op("Gemm", [x, weight], scope, transB=1)
        return self.op("MatMul", [x, self.op("Transpose", [weight], scope, perm=(1, 0))], scope)

    def silu_gate(self, gate: str, up: str, scope: str) -> str:
        """`silu(gate) * up`."""
        act = f"{scope}.act_fn"
        return self.op("Mul", [self.op("Mul", [gate, self.op("Sigmoid", [gate], act)], act), up], scope)

    def clipped_gate(self, gate: str, up: str, scope: str) -> str:
        """`gate * sigmoid(1.702 gate) * (up + 1)`, with `gate` at most 7 and `up` between -7 and 7."""
        act = f"{scope}.act_fn"
        most, least = self.scalar("most", 7.0), self.scalar("least", -7.0)
        gate = self.op("Min", [gate, most], act)
        up = self.op("Max", [self.op("Min", [up, most], act), least], act)
        curve = self.op("Sigmoid", [self.op("Mul", [gate, self.scalar("alpha", 1.702)], act)], act)
        up = self.op("Add", [up, self.scalar("one", 1.0)], act)
        return self.op("Mul", [self.op("Mul", [gate, curve], act), up], scope)

    def experts(
        self,
        x: str,
        scope: str,
        chosen: Sequence[str],
        *,
        num_experts: int,
        ffn: int,
        groups: int = 1,
        clipped: bool = False,
    ) -> str:
        """A mixture of gated MLPs; as in published checkpoints, one parameter holds the gates and ups of all experts.

        Args:
            x: tokens, [b, s, h].
            scope: scope of the parameters.
            chosen: indices of the chosen experts and the weights of their results, both [b, s, k].
            num_experts: number of experts.
            ffn: width of each expert.
            groups: number of groups into which a sample's tokens are divided; each is routed separately.
            clipped: whether both products have biases and the gate is clipped (GPT-OSS).
        """
        experts, weights = chosen
        _, length, width = self.shape(x)
        routed = length * self.shape(experts)[-1]
        capacity = -(-routed // (num_experts * groups))
        some = {"groups": groups} if groups > 1 else {}
        slots = self.op(DISPATCH, [x, experts], scope, num_experts=num_experts, capacity=capacity, **some)

        def product(x: str, name: str, out: int) -> str:
            weight = self.parameter(f"{scope}.{name}", num_experts, out, self.shape(x)[-1])
            weight = self.op("Transpose", [weight], scope, perm=(0, 2, 1))
            x = self.op(PRODUCT, [x, weight], scope, num_tokens=routed)
            if not clipped:
                return x
            bias = self.parameter(f"{scope}.{name}_bias", num_experts, out)
            return self.add(x, self.op("Unsqueeze", [bias], scope, axes=(1,)), scope)

        gate, up = self.ops("Split", [product(slots, "gate_up_proj", 2 * ffn)], scope, 2, axis=-1, split=(ffn, ffn))
        slots = product((self.clipped_gate if clipped else self.silu_gate)(gate, up, scope), "down_proj", width)
        if BALANCED_LOAD not in self.builder.warnings:
            self.builder.warnings.append(BALANCED_LOAD)
        return self.op(COMBINE, [slots, experts, weights], scope)

    def embedding(self, ids: str, scope: str, rows: int, width: int) -> str:
        """`torch.nn.Embedding`."""
        return self.op("Gather", [self.parameter(f"{scope}.weight", rows, width), ids], scope, axis=0)

    def positions(self, length: int) -> str:
        """The positions 0, 1, ... `length` - 1."""
        return self.op("Range", [], start=0, limit=length, delta=1, dtype="int64")

    def layer_norm(self, x: str, scope: str, epsilon: float = 1e-5) -> str:
        """`torch.nn.LayerNorm`."""
        width = self.shape(x)[-1]
        operands = [x, self.parameter(f"{scope}.weight", width), self.parameter(f"{scope}.bias", width)]
        return self.op("LayerNormalization", operands, scope, axis=-1, epsilon=epsilon)

    def rms_norm(self, x: str, scope: str, epsilon: float = 1e-6) -> str:
        """`torch.nn.RMSNorm`."""
        weight = self.parameter(f"{scope}.weight", self.shape(x)[-1])
        return self.op("RMSNormalization", [x, weight], scope, axis=-1, epsilon=epsilon)

    def causal_mask(self, length: int) -> str:
        """A causal mask, to be added to attention scores."""
        full = self.op("ConstantOfShape", [], shape=(length, length), value=LOWEST)
        diagonal = self.builder.constant("diagonal", np.array(1, dtype=np.int64))
        return self.op("Trilu", [full, diagonal], upper=1)

    def heads(self, x: str, scope: str, heads: int, *, transposed: bool = False) -> str:
        """`[b, s, (h d)] -> [b, h, s, d]`, or to `[b, h, d, s]`."""
        _, length, width = self.shape(x)
        x = self.op("Reshape", [x], scope, shape=(1, length, heads, width // heads))
        return self.op("Transpose", [x], scope, perm=(0, 2, 3, 1) if transposed else (0, 2, 1, 3))

    def dropout(self, x: str, scope: str, percent: int) -> str:
        """`torch.nn.Dropout` in training; returns `x` if `percent` is 0."""
        return self.ops("Dropout", [x], scope, 2, ratio=percent / 100)[0] if percent else x

    def repeated(self, x: str, scope: str, heads: int) -> str:
        """Repeats heads of keys or values, `[b, h, s, d]`, for the query heads that share them: `[b, heads, s, d]`."""
        _, kv_heads, length, size = self.shape(x)
        if kv_heads == heads:
            return x
        x = self.op("Unsqueeze", [x], scope, axes=(2,))
        x = self.op("Expand", [x], scope, shape=(1, kv_heads, heads // kv_heads, length, size))
        return self.op("Reshape", [x], scope, shape=(1, heads, length, size))

    def attend(
        self,
        q: str,
        k: str,
        v: str,
        scope: str,
        *,
        masks: Sequence[str] = (),
        scale: bool = True,
        dropout_percent: int = 0,
    ) -> str:
        """Softmax attention.

        Args:
            q: queries, `[b, h, s, d]`.
            k: transposed keys, `[b, h, d, t]`.
            v: values, `[b, h, t, d]`.
            scope: scope of the operators.
            masks: tensors that are added to the scores.
            scale: whether scores are divided by the square root of the head size.
            dropout_percent: dropout of the attention weights.

        Returns:
            the result with merged heads, `[b, s, (h d)]`.
        """
        size = self.shape(q)[-1]
        scores = self.op("MatMul", [q, k], scope)
        if scale:
            scores = self.op("Mul", [scores, self.scalar("attention_scale", size**-0.5)], scope)
        for mask in masks:
            scores = self.add(scores, mask, scope)
        weights = self.dropout(self.op("Softmax", [scores], scope, axis=-1), scope, dropout_percent)
        context = self.op("MatMul", [weights, v], scope)
        _, heads, length, size = self.shape(context)
        joined = self.op("Transpose", [context], scope, perm=(0, 2, 1, 3))
        return self.op("Reshape", [joined], scope, shape=(1, length, heads * size))

    def fused_attention(
        self,
        x: str,
        scope: str,
        names: tuple[str, str],
        heads: int,
        *,
        masks: Sequence[str] = (),
        qk_norm: bool = False,
        dropout_percent: int = 0,
    ) -> str:
        """Self-attention with one linear layer for queries, keys and values; it becomes pieces `#q`, `#k`, `#v`."""
        width = self.shape(x)[-1]
        fused = self.linear(x, f"{scope}.{names[0]}", 3 * width)
        q, k, v = self.ops("Split", [fused], scope, 3, axis=-1, split=(width,) * 3)
        if qk_norm:
            q, k, v = (self.heads(t, scope, heads) for t in (q, k, v))
            q, k = (self.layer_norm(t, f"{scope}.{name}", 1e-6) for t, name in ((q, "q_norm"), (k, "k_norm")))
            k = self.op("Transpose", [k], scope, perm=(0, 1, 3, 2))
        else:
            q, k, v = (self.heads(t, scope, heads, transposed=t == k) for t in (q, k, v))
        y = self.attend(q, k, v, scope, masks=masks, dropout_percent=dropout_percent)
        return self.linear(y, f"{scope}.{names[1]}", width)

    def conv(
        self, x: str, scope: str, out: int, kernel: int, *, stride: int = 1, pad: int = 0, groups: int = 1, bias: bool
    ) -> str:
        """`torch.nn.Conv2d`."""
        operands = [x, self.parameter(f"{scope}.weight", out, self.shape(x)[1] // groups, kernel, kernel)]
        if bias:
            operands.append(self.parameter(f"{scope}.bias", out))
        square = {"kernel_shape": (kernel,) * 2, "strides": (stride,) * 2, "dilations": (1, 1), "pads": (pad,) * 4}
        return self.op("Conv", operands, scope, group=groups, **square)

    def batch_norm(self, x: str, scope: str) -> str:
        """`torch.nn.BatchNorm2d`."""
        width = self.shape(x)[1]
        operands = [x, self.parameter(f"{scope}.weight", width), self.parameter(f"{scope}.bias", width)]
        operands += [self.buffer(f"{scope}.running_{name}", width) for name in ("mean", "var")]
        return self.op("BatchNormalization", operands, scope, epsilon=1e-5, momentum=0.9)

    def swish(self, x: str, scope: str) -> str:
        """`torch.nn.SiLU`, as it is exported."""
        return self.op("Mul", [x, self.op("Sigmoid", [x], scope)], scope)

    def excited(self, x: str, scope: str, narrow: int, activation: str = "relu") -> str:
        """Squeeze and excitation: each channel times a number that the means of all channels make."""
        y = self.op("ReduceMean", [x], scope, axes=(2, 3), keepdims=1)
        y = self.conv(y, f"{scope}.fc1", narrow, 1, bias=True)
        y = self.swish(y, scope) if activation == "swish" else self.op("Relu", [y], scope)
        y = self.conv(y, f"{scope}.fc2", self.shape(x)[1], 1, bias=True)
        return self.op("Mul", [x, self.op("Sigmoid", [y], scope)], scope)

    def max_pool(self, x: str, scope: str, kernel: int, stride: int, pad: int = 0) -> str:
        """`torch.nn.MaxPool2d`."""
        return self.op(
            "MaxPool", [x], scope, kernel_shape=(kernel,) * 2, strides=(stride,) * 2, pads=(pad,) * 4, ceil_mode=0
        )

    def flatten(self, x: str) -> str:
        """Merges all dims of a sample into one."""
        return self.op("Reshape", [x], shape=(1, prod(self.shape(x)[1:])))

    def finish(self, scores: str, *, loss: str | None = None) -> Graph:
        """The graph with its loss, after the same rewrites as those of imported files."""
        return with_loss(split_fused(canonical(self.builder.finish([scores]))), loss)
