"""Scans of transformers' models as one operator each, where torch's exporter would unroll them.

If the special kernels of these models are not installed, their code updates a state in a loop over tokens or chunks.
With 8,192 tokens, each layer of an export would have tens of thousands of operators. The kernels do all of it in one
operator, see `ir.operators.scans`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

VERSION = 1
"""Version of the domain `automap` in exported files."""
EPSILON = 1e-6
"""What transformers' `l2norm` adds below the root, as flash-linear-attention does."""


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The gated delta rule with the arguments of transformers, without a state before or after the sequence.

    Args:
        query: [batch, length, heads of keys, d].
        key: [batch, length, heads of keys, d].
        value: [batch, length, heads of values, e], of which so many share a head of keys as there are more of them.
        g: [batch, length, heads of values] logarithm of the decay, or [batch, length, heads of values, d].
        beta: [batch, length, heads of values] update rate.
        use_qk_l2norm_in_kernel: whether queries and keys are normalised first.
    """
    import torch

    heads = value.shape[2]
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON) for x in (query, key))
    query, key = (x.repeat_interleave(heads // x.shape[2], dim=2) if x.shape[2] != heads else x for x in (query, key))
    packed = [x.flatten(2) for x in (query, key, value)]
    found = torch.onnx.ops.symbolic(
        "automap::LinearAttention", (*packed, None, g.flatten(2).to(value.dtype), beta.to(value.dtype)),
        {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": "gated_delta"},
        dtype=value.dtype, shape=packed[2].shape, version=VERSION,
    )  # fmt: skip
    # What `symbolic` returns is on the CPU, also where its operands are not.
    return found.to(value.device).reshape(value.shape), None


def selective_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None, **more: Any,
) -> Tensor | tuple[Tensor, None]:  # fmt: skip
    """Mamba's selective scan with the arguments of transformers, without a state before or after the sequence.

    Args:
        hidden_states: [batch, channels, length].
        dt: [batch, channels, length] steps.
        A: [channels, states].
        B: [batch, states, length].
        C: [batch, states, length].
        D: [channels] share of the values that the result has besides.
        z: [batch, channels, length] gate.
        more: `delta_bias` [channels] and `delta_softplus` for the steps; `return_last_state` = with a state, None here.
    """
    import torch
    from torch.nn import functional

    if (bias := more.get("delta_bias")) is not None:
        dt = dt + bias.to(dt.dtype)[..., None]
    if more.get("delta_softplus"):
        dt = functional.softplus(dt)
    operands = tuple(x.to(hidden_states.dtype) for x in (hidden_states, dt, A, B, C))
    found = torch.onnx.ops.symbolic(
        "automap::SelectiveScan", operands, dtype=hidden_states.dtype, shape=hidden_states.shape, version=VERSION
    ).to(hidden_states.device)
    if D is not None:
        found = found + hidden_states * D[None, :, None].to(hidden_states.dtype)
    if z is not None:
        found = found * functional.silu(z)
    return (found, None) if more.get("return_last_state") else found


_SCANS: Mapping[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba_selective_scan": selective_scan,
}
"""Function of transformers: what stands for it in an export."""


@contextlib.contextmanager
def scans_as_operators(module: nn.Module) -> Iterator[None]:
    """A context in which models of transformers call the functions here in place of their own."""
    names = sorted({type(part).__module__ for part in module.modules()})
    files = [sys.modules[name] for name in names if name.startswith("transformers.")]
    own = [(file, name, vars(file)[name]) for file in files for name in _SCANS if name in vars(file)]
    for file, name, _ in own:
        setattr(file, name, _SCANS[name])
    try:
        yield
    finally:
        for file, name, function in own:
            setattr(file, name, function)
