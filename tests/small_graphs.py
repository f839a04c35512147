"""Small graphs built directly; imports as little as the ranks of a launch can do with."""

import itertools

from ir.build import GraphBuilder
from ir.graph import Graph
from ir.loss import with_loss


def build_mlp(widths: tuple[int, ...] = (64, 256, 64), *, equal: bool = False) -> Graph:
    """Linear layers with ReLU between and cross-entropy behind; no biases."""
    b = GraphBuilder()
    x = b.input("x", (1, widths[0]))
    for i, (k, n) in enumerate(itertools.pairwise(widths)):
        w = b.parameter(f"w{i}", (k, n))
        (x,) = b.add("MatMul", [x, w], [f"y{i}"], scope=f"layers.{i}")
        if i < len(widths) - 2:
            (x,) = b.add("Relu", [x], [f"a{i}"], scope=f"layers.{i}")
    return with_loss(b.finish([x], name="mlp"))


def build_gpt(*, layers: int = 2, hidden: int = 64, heads: int = 4, seq: int = 32, vocab: int = 128) -> Graph:
    """A decoder with tied embedding and head, plain softmax attention without a mask, biases in the linear layers."""
    b = GraphBuilder()
    ids = b.input("ids", (1, seq), "int64")
    wte = b.parameter("wte", (vocab, hidden))
    (x,) = b.add("Gather", [wte, ids], ["embedding"], scope="wte", attributes={"axis": 0}, opset=20)

    def linear(x: str, scope: str, k: int, n: int) -> str:
        w, bias = b.parameter(f"{scope}.weight", (k, n)), b.parameter(f"{scope}.bias", (n,))
        (y,) = b.add("MatMul", [x, w], [f"{scope}.product"], scope=scope, opset=20)
        return b.add("Add", [y, bias], [f"{scope}.out"], scope=scope, opset=20)[0]

    def norm(x: str, scope: str) -> str:
        w, bias = b.parameter(f"{scope}.weight", (hidden,)), b.parameter(f"{scope}.bias", (hidden,))
        return b.add(
            "LayerNormalization", [x, w, bias], [f"{scope}.out"], scope=scope, attributes={"axis": -1}, opset=20
        )[0]

    def heads_of(x: str, scope: str, perm: tuple[int, ...]) -> str:
        shape = b.constant(f"{scope}.shape", _ints(1, seq, heads, hidden // heads))
        (y,) = b.add("Reshape", [x, shape], [f"{scope}.split"], scope=scope, opset=20)
        return b.add("Transpose", [y], [f"{scope}.heads"], scope=scope, attributes={"perm": perm}, opset=20)[0]

    for i in range(layers):
        s = f"h.{i}"
        n = norm(x, f"{s}.ln_1")
        q = heads_of(linear(n, f"{s}.attn.q", hidden, hidden), f"{s}.attn.q", (0, 2, 1, 3))
        k = heads_of(linear(n, f"{s}.attn.k", hidden, hidden), f"{s}.attn.k", (0, 2, 3, 1))
        v = heads_of(linear(n, f"{s}.attn.v", hidden, hidden), f"{s}.attn.v", (0, 2, 1, 3))
        (scores,) = b.add("MatMul", [q, k], [f"{s}.scores"], scope=f"{s}.attn", opset=20)
        (p,) = b.add("Softmax", [scores], [f"{s}.p"], scope=f"{s}.attn", attributes={"axis": -1}, opset=20)
        (context,) = b.add("MatMul", [p, v], [f"{s}.context"], scope=f"{s}.attn", opset=20)
        (joined,) = b.add(
            "Transpose", [context], [f"{s}.joined"], scope=f"{s}.attn", attributes={"perm": (0, 2, 1, 3)}, opset=20
        )
        shape = b.constant(f"{s}.merge", _ints(1, seq, hidden))
        (merged,) = b.add("Reshape", [joined, shape], [f"{s}.merged"], scope=f"{s}.attn", opset=20)
        out = linear(merged, f"{s}.attn.proj", hidden, hidden)
        (x,) = b.add("Add", [x, out], [f"{s}.x1"], scope=s, opset=20)
        up = linear(norm(x, f"{s}.ln_2"), f"{s}.mlp.up", hidden, 4 * hidden)
        (act,) = b.add("Gelu", [up], [f"{s}.act"], scope=f"{s}.mlp", opset=20)
        (x,) = b.add("Add", [x, linear(act, f"{s}.mlp.down", 4 * hidden, hidden)], [f"{s}.x2"], scope=s, opset=20)
    (head,) = b.add("Transpose", [wte], ["wte.T"], scope="lm_head", attributes={"perm": (1, 0)}, opset=20)
    (logits,) = b.add("MatMul", [norm(x, "ln_f"), head], ["logits"], scope="lm_head", opset=20)
    return with_loss(b.finish([logits], name="gpt"))


def _ints(*values: int):
    import numpy as np

    return np.array(values, dtype=np.int64)
