"""The family of decoders with parallel attention and MLP (GPT-NeoX, Falcon, PaLM)."""

from __future__ import annotations

from dataclasses import dataclass

from ir.graph import Graph
from ir.zoo.net import Net
from ir.zoo.transformers import Stack


@dataclass(frozen=True, kw_only=True)
class Parallel(Stack):
    """Decoder whose attention and MLP both read the layer's input, and are added to it (arXiv 2204.02311)."""

    kv_heads: int = 0
    """Heads of keys and values; 0 = as many as `heads`."""
    head_dim: int = 0
    """Size of a head; 0 = `hidden` over `heads`."""
    rope_dim: int = 0
    """Size of the part of a head with rotary positions; 0 = the whole head."""
    norms: int = 1
    """1 = attention and MLP share a norm; 2 = each has its own."""
    biases: int = 0
    """1 = all linear layers except the head have biases."""
    mlp_matrices: int = 2
    """2 = GELU between two matrices; 3 = gated MLP."""
    tied: int = 0
    """1 = the head shares the embedding's parameter; 0 = it has its own."""
    seq_len: int = 2048
    vocab_size: int = 65024

    def build(self, loss: str | None) -> Graph:
        """The graph."""
        net = Net()
        ids = net.builder.input("ids", (1, self.seq_len), "int64")
        x = net.embedding(ids, "embed_in", self.vocab_size, self.hidden)
        mask = net.causal_mask(self.seq_len)
        for i in self.built:
            layer = f"layers.{i}"
            y = net.layer_norm(x, f"{layer}.input_layernorm")
            attended = self._attention(net, y, f"{layer}.attention", mask)
            z = net.layer_norm(x, f"{layer}.post_attention_layernorm") if self.norms == 2 else y
            x = net.add(x, net.add(self._mlp(net, z, f"{layer}.mlp"), attended, layer), layer)
        x = net.layer_norm(x, "final_layer_norm")
        if self.tied:
            scores = net.product(x, "embed_in.weight", "embed_out")
        else:
            scores = net.linear(x, "embed_out", self.vocab_size, bias=False)
        return self.stretched(net.finish(scores, loss=loss), "layers")

    @property
    def rotated(self) -> int:
        """Size of the part of a head with rotary positions."""
        return self.rope_dim or self.size

    @property
    def size(self) -> int:
        """Size of a head."""
        return self.head_dim or self.hidden // self.heads

    def _attention(self, net: Net, x: str, scope: str, mask: str) -> str:
        kv_heads, has_bias = self.kv_heads or self.heads, bool(self.biases)
        tables = [net.buffer(f"rotary_emb.{name}", 1, self.seq_len, self.rotated // 2) for name in ("cos", "sin")]
        q, k, v = (
            net.heads(net.linear(x, f"{scope}.{name}", count * self.size, bias=has_bias), scope, count)
            for name, count in (("query", self.heads), ("key", kv_heads), ("value", kv_heads))
        )
        q, k = (self._turned(net, t, tables, scope) for t in (q, k))
        k, v = (net.repeated(t, scope, self.heads) for t in (k, v))
        k = net.op("Transpose", [k], scope, perm=(0, 1, 3, 2))
        return net.linear(net.attend(q, k, v, scope, masks=[mask]), f"{scope}.dense", self.hidden, bias=has_bias)

    def _turned(self, net: Net, x: str, tables: list[str], scope: str) -> str:
        """Applies rotary positions to the first part of each head of queries or keys."""
        if self.rotated == self.size:
            return net.op("RotaryEmbedding", [x, *tables], scope)
        turned, kept = net.ops("Split", [x], scope, 2, axis=-1, split=(self.rotated, self.size - self.rotated))
        return net.op("Concat", [net.op("RotaryEmbedding", [turned, *tables], scope), kept], scope, axis=-1)

    def _mlp(self, net: Net, x: str, scope: str) -> str:
        has_bias = bool(self.biases)
        if self.mlp_matrices == 3:
            gate, up = (net.linear(x, f"{scope}.{name}", self.width, bias=has_bias) for name in ("gate", "up"))
            y = net.silu_gate(gate, up, scope)
        else:
            y = net.op("Gelu", [net.linear(x, f"{scope}.dense_h_to_4h", self.width, bias=has_bias)], scope)
        return net.linear(y, f"{scope}.dense_4h_to_h", self.hidden, bias=has_bias)
