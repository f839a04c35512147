"""Small graphs built directly; imports as little as the ranks of a launch can do with."""

import itertools
from collections.abc import Sequence

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


def build_shared(layers: int, *, turned: bool) -> Graph:
    """Layers that all have one pair of weights, as ALBERT's: read as they are, or through one Transpose each."""
    b = GraphBuilder()
    x = b.input("x", (1, 8, 16))
    weights = []
    for name, shape in (("up", (16, 64)), ("down", (64, 16))):
        weights.append(b.parameter(name, shape[::-1] if turned else shape))
        if turned:
            weights[-1:] = b.add("Transpose", weights[-1:], [f"{name}.T"], attributes={"perm": (1, 0)})
    (x,) = b.add("MatMul", [x, b.parameter("first", (16, 16))], ["begin"])
    for i in range(layers):
        (y,) = b.add("MatMul", [x, weights[0]], [f"u{i}"])
        (y,) = b.add("Relu", [y], [f"r{i}"])
        (y,) = b.add("MatMul", [y, weights[1]], [f"d{i}"])
        (x,) = b.add("Add", [x, y], [f"x{i}"])
    return with_loss(b.finish([x], name="shared"))


def build_gpt(
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    seq: int = 32,
    vocab: int = 128,
    windows: Sequence[tuple[int, int]] = (),
) -> Graph:
    """A decoder with tied embedding and head, plain softmax attention, biases in the linear layers.

    `windows` says for each layer how many keys before and behind its own position a query sees; empty = no masks.
    """
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

    if windows:
        row = b.add("Range", [b.constant(n, _ints(v)) for n, v in (("0", 0), ("s", seq), ("1", 1))], ["row"], opset=20)
        column = b.add("Unsqueeze", [*row, b.constant("axis", _ints(1))], ["column"], opset=20)
        ahead = b.add("Sub", [*row, *column], ["ahead"], opset=20)

    def masked(scores: str, i: int) -> str:
        left, right = windows[i]
        far, near = b.constant(f"left.{i}", _ints(-left)), b.constant(f"right.{i}", _ints(right))
        sides = b.add("GreaterOrEqual", [*ahead, far], [f"far.{i}"], opset=20)
        sides += b.add("LessOrEqual", [*ahead, near], [f"near.{i}"], opset=20)
        fill = [b.constant(f"{v}.{i}", _floats(v)) for v in (0, -1e9)]
        mask = b.add("Where", [*b.add("And", sides, [f"both.{i}"], opset=20), *fill], [f"mask.{i}"], opset=20)
        return b.add("Add", [scores, *mask], [f"{scores}.masked"], scope=f"h.{i}.attn", opset=20)[0]

    for i in range(layers):
        s = f"h.{i}"
        n = norm(x, f"{s}.ln_1")
        q = heads_of(linear(n, f"{s}.attn.q", hidden, hidden), f"{s}.attn.q", (0, 2, 1, 3))
        k = heads_of(linear(n, f"{s}.attn.k", hidden, hidden), f"{s}.attn.k", (0, 2, 3, 1))
        v = heads_of(linear(n, f"{s}.attn.v", hidden, hidden), f"{s}.attn.v", (0, 2, 1, 3))
        (scores,) = b.add("MatMul", [q, k], [f"{s}.scores"], scope=f"{s}.attn", opset=20)
        scores = masked(scores, i) if windows else scores
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


def _floats(*values: float):
    import numpy as np

    return np.array(values, dtype=np.float32)
