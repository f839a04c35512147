"""The families GPT, Llama, mixtures of experts, BERT, ViT and T5."""

from __future__ import annotations

from dataclasses import dataclass

from ir.graph import Graph
from ir.zoo.net import LOWEST, Net
from ir.zoo.stretch import stretch

BUILT = 2
"""Number of layers of a stack that are built operator by operator; the remaining layers are copies of the last one."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Sizes of a stack of equal layers."""

    layers: int
    hidden: int
    heads: int
    ffn: int = 0
    """Width of the MLP; 0 = 4 times `hidden`."""

    @property
    def width(self) -> int:
        """Width of the MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def built(self) -> range:
        """Indices of the layers that are built operator by operator."""
        return range(min(self.layers, BUILT))

    def stretched(self, graph: Graph, stack: str) -> Graph:
        """The graph with all layers of a stack."""
        return stretch(graph, stack, BUILT - 1, self.layers)


@dataclass(frozen=True, kw_only=True)
class Gpt(Stack):
    """Decoder with learned positions and a layer norm before attention and MLP; the head shares the embedding."""

    seq_len: int = 1024
    positions: int = 0
    """Number of rows of the table of positions; at least `seq_len` are used."""
    vocab_size: int = 50257
    dropout_percent: int = 0
    """Percentage of activations dropped after embeddings, attention weights, attention and MLP."""
    relu: int = 0
    """1 = ReLU in the MLP (OPT, arXiv 2205.01068); 0 = GELU."""
    alibi: int = 0
    """1 = linear biases of attention scores in place of learned positions, and a layer norm after the embedding (BLOOM,
    arXiv 2211.05100); 0 = learned positions."""

    def build(self, loss: str | None) -> Graph:
        """The graph."""
        net = Net()
        ids = net.builder.input("ids", (1, self.seq_len), "int64")
        x = net.embedding(ids, "wte", self.vocab_size, self.hidden)
        if self.alibi:
            x, masks = net.layer_norm(x, "wte_layernorm"), [net.buffer("alibi", 1, self.heads, 1, self.seq_len)]
        else:
            rows, masks = max(self.positions, self.seq_len), list[str]()
            x = net.add(x, net.embedding(net.positions(self.seq_len), "wpe", rows, self.hidden))
        x = net.dropout(x, "drop", self.dropout_percent)
        masks.append(net.causal_mask(self.seq_len))
        for i in self.built:
            h = f"h.{i}"
            y = net.layer_norm(x, f"{h}.ln_1")
            names, drop = ("c_attn", "c_proj"), self.dropout_percent
            y = net.fused_attention(y, f"{h}.attn", names, self.heads, masks=masks, dropout_percent=drop)
            x = net.add(x, net.dropout(y, f"{h}.attn", drop), h)
            y = net.linear(net.layer_norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc", self.width)
            y = net.op("Relu", [y], f"{h}.mlp") if self.relu else net.op("Gelu", [y], f"{h}.mlp", approximate="tanh")
            y = net.dropout(net.linear(y, f"{h}.mlp.c_proj", self.hidden), f"{h}.mlp", drop)
            x = net.add(x, y, h)
        logits = net.product(net.layer_norm(x, "ln_f"), "wte.weight", "lm_head")
        return self.stretched(net.finish(logits, loss=loss), "h")


@dataclass(frozen=True, kw_only=True)
class Llama:
    """Decoder with rotary positions, RMS norms, a gated MLP, and grouped queries or multi-head latent attention."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0
    """Heads of keys and values; 0 = as many as `heads`. Not used with `kv_rank`, where each head has its own."""
    head_dim: int = 0
    """Size of a head; 0 = `hidden` over `heads`. With `kv_rank`, size of the part of a head without positions."""
    kv_rank: int = 0
    """Size of the latent from which keys and values are computed (multi-head latent attention, DeepSeek-V2, arXiv
    2405.04434); 0 = ordinary attention."""
    q_rank: int = 0
    """Size of the latent from which queries are computed; 0 = queries are computed from the layer's input."""
    rope_dim: int = 64
    """With `kv_rank`, size of the part of queries and keys with rotary positions; all heads share that of the keys."""
    qk_norm: int = 0
    """1 = an RMS norm of each head of queries and keys (Qwen 3, arXiv 2505.09388); 0 = none."""
    qkv_bias: int = 0
    """1 = queries, keys and values have biases (Qwen 2, arXiv 2407.10671); 0 = none. Not used with `kv_rank`."""
    tied: int = 0
    """1 = the head shares the embedding's parameter (Llama 3.2, small Qwens); 0 = it has its own."""
    value_dim: int = 0
    """With `kv_rank`, size of a head of the values; 0 = `head_dim`."""
    ffn: int = 0
    """Width of the gated MLP; 0 = 8/3 of `hidden`, rounded up to a multiple of 256."""
    mlp_matrices: int = 3
    """3 = gated MLP; 2 = squared ReLU between two matrices (Nemotron-4, arXiv 2402.16819)."""
    seq_len: int = 4096
    vocab_size: int = 32000

    def build(self, loss: str | None) -> Graph:
        """The graph."""
        net = Net()
        ids = net.builder.input("ids", (1, self.seq_len), "int64")
        x = net.embedding(ids, "embed_tokens", self.vocab_size, self.hidden)
        mask = net.causal_mask(self.seq_len)
        built = min(self.layers, self._unlike + BUILT)
        for i in range(built):
            layer = f"layers.{i}"
            y = self._attention(net, net.rms_norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn", mask)
            x = net.add(x, y, layer)
            y = net.rms_norm(x, f"{layer}.post_attention_layernorm")
            x = net.add(x, (self._mlp if i >= self._unlike else self._dense)(net, y, f"{layer}.mlp"), layer)
        x = net.rms_norm(x, "norm")
        if self.tied:
            logits = net.product(x, "embed_tokens.weight", "lm_head")
        else:
            logits = net.linear(x, "lm_head", self.vocab_size, bias=False)
        return stretch(net.finish(logits, loss=loss), "layers", built - 1, self.layers)

    @property
    def rotated(self) -> int:
        """Size of the part of a head with rotary positions."""
        return self.rope_dim if self.kv_rank else self.head_dim or self.hidden // self.heads

    @property
    def _unlike(self) -> int:
        """Number of leading layers whose MLP is of another kind than that of the others."""
        return 0

    @property
    def _is_biased(self) -> bool:
        """Whether all linear layers of attention have biases."""
        return False

    def _attention(self, net: Net, x: str, scope: str, mask: str) -> str:
        if self.kv_rank:
            return self._latent_attention(net, x, scope, mask)
        size, kv_heads = self.head_dim or self.hidden // self.heads, self.kv_heads or self.heads
        tables, bias = self._rotary_tables(net), bool(self.qkv_bias) or self._is_biased
        q, k, v = (
            net.heads(net.linear(x, f"{scope}.{name}", count * size, bias=bias), scope, count)
            for name, count in (("q_proj", self.heads), ("k_proj", kv_heads), ("v_proj", kv_heads))
        )
        if self.qk_norm:
            q, k = (net.rms_norm(t, f"{scope}.{name}") for t, name in ((q, "q_norm"), (k, "k_norm")))
        q, k = (net.op("RotaryEmbedding", [t, *tables], scope) for t in (q, k))
        k, v = (net.repeated(t, scope, self.heads) for t in (k, v))
        k = net.op("Transpose", [k], scope, perm=(0, 1, 3, 2))
        y = net.attend(q, k, v, scope, masks=[mask])
        return net.linear(y, f"{scope}.o_proj", self.hidden, bias=self._is_biased)

    def _latent_attention(self, net: Net, x: str, scope: str, mask: str) -> str:
        """Multi-head latent attention; all heads share the part of the keys with rotary positions."""
        size, tables = self.head_dim or self.hidden // self.heads, self._rotary_tables(net)
        of_values = self.value_dim or size
        y, name = x, "q_proj"
        if self.q_rank:
            y, name = net.linear(x, f"{scope}.q_a_proj", self.q_rank, bias=False), "q_b_proj"
            y = net.rms_norm(y, f"{scope}.q_a_layernorm")
        q = net.linear(y, f"{scope}.{name}", self.heads * (size + self.rope_dim), bias=False)
        q, turned = self._parts(net, net.heads(q, scope, self.heads), scope, (size, self.rope_dim))
        q = net.op("Concat", [q, net.op("RotaryEmbedding", [turned, *tables], scope)], scope, axis=-1)
        y = net.linear(x, f"{scope}.kv_a_proj_with_mqa", self.kv_rank + self.rope_dim, bias=False)
        latent, turned = self._parts(net, y, scope, (self.kv_rank, self.rope_dim))
        y = net.rms_norm(latent, f"{scope}.kv_a_layernorm")
        y = net.linear(y, f"{scope}.kv_b_proj", self.heads * (size + of_values), bias=False)
        k, v = self._parts(net, net.heads(y, scope, self.heads), scope, (size, of_values))
        turned = net.op("RotaryEmbedding", [net.heads(turned, scope, 1), *tables], scope)
        turned = net.op("Expand", [turned], scope, shape=(1, self.heads, self.seq_len, self.rope_dim))
        k = net.op("Transpose", [net.op("Concat", [k, turned], scope, axis=-1)], scope, perm=(0, 1, 3, 2))
        return net.linear(net.attend(q, k, v, scope, masks=[mask]), f"{scope}.o_proj", self.hidden, bias=False)

    def _rotary_tables(self, net: Net) -> list[str]:
        """The tables of cosines and sines of the rotation angles of all positions."""
        return [net.buffer(f"rotary_emb.{name}", 1, self.seq_len, self.rotated // 2) for name in ("cos", "sin")]

    def _parts(self, net: Net, x: str, scope: str, sizes: tuple[int, int]) -> tuple[str, ...]:
        """Splits the last dim into two parts."""
        return net.ops("Split", [x], scope, 2, axis=-1, split=sizes)

    @property
    def _width(self) -> int:
        return self.ffn or -(-(8 * self.hidden) // 3 // 256) * 256

    def _dense(self, net: Net, x: str, scope: str) -> str:
        return self._gated(net, x, scope, self._width)

    def _mlp(self, net: Net, x: str, scope: str) -> str:
        if self.mlp_matrices == 2:
            up = net.linear(x, f"{scope}.up_proj", self._width, bias=False)
            up = net.op("Relu", [up], f"{scope}.act_fn")
            return net.linear(net.op("Mul", [up, up], f"{scope}.act_fn"), f"{scope}.down_proj", self.hidden, bias=False)
        return self._dense(net, x, scope)

    def _gated(self, net: Net, x: str, scope: str, width: int) -> str:
        gate = net.linear(x, f"{scope}.gate_proj", width, bias=False)
        up = net.linear(x, f"{scope}.up_proj", width, bias=False)
        return net.linear(net.silu_gate(gate, up, scope), f"{scope}.down_proj", self.hidden, bias=False)


@dataclass(frozen=True, kw_only=True)
class Moe(Llama):
    """Llama with experts in place of the MLP; a router picks `top_k` of them for each token (Mixtral, Qwen-MoE)."""

    experts: int
    top_k: int = 2
    moe_ffn: int = 0
    """Width of an expert; 0 = `ffn`."""
    shared_ffn: int = 0
    """Width of a gated MLP that all tokens pass through in addition to their experts (shared expert); 0 = none."""
    dense_layers: int = 0
    """Leading layers with a plain gated MLP of width `ffn` (DeepSeek-V2, arXiv 2405.04434)."""
    groups: int = 1
    """Number of groups of a sample's tokens that are routed separately; see `ir.operators.experts`."""
    clipped: int = 0
    """1 = attention, router and experts have biases, and experts clip their gate (GPT-OSS, arXiv 2508.10925); 0 = no
    biases, and a SiLU gate. Not used with `kv_rank`, `shared_ffn` or `dense_layers`."""

    @property
    def _is_biased(self) -> bool:
        return bool(self.clipped)

    @property
    def _unlike(self) -> int:
        return min(self.dense_layers, self.layers)

    def _mlp(self, net: Net, x: str, scope: str) -> str:
        scores = net.linear(x, f"{scope}.gate", self.experts, bias=self._is_biased)
        scores = net.op("Softmax", [scores], f"{scope}.gate", axis=-1)
        weights, chosen = net.ops("TopK", [scores], f"{scope}.gate", 2, k=self.top_k, axis=-1, largest=1, sorted=1)
        total = net.op("ReduceSum", [weights], f"{scope}.gate", axes=(-1,), keepdims=1)
        weights = net.op("Div", [weights, total], f"{scope}.gate")
        sizes = {"num_experts": self.experts, "ffn": self.moe_ffn or self._width, "groups": self.groups}
        y = net.experts(x, f"{scope}.experts", (chosen, weights), clipped=self._is_biased, **sizes)
        if self.shared_ffn:
            y = net.add(y, self._gated(net, x, f"{scope}.shared_expert", self.shared_ffn), scope)
        return y


@dataclass(frozen=True, kw_only=True)
class Bert(Stack):
    """Encoder with a layer norm after attention and MLP, for masked words; the head shares the embedding."""

    seq_len: int = 512
    positions: int = 0
    """Number of rows of the table of positions; at least `seq_len` are used."""
    vocab_size: int = 30522
    dropout_percent: int = 0
    """Percentage of activations dropped after embeddings, attention weights, attention and MLP."""

    def build(self, loss: str | None) -> Graph:
        """The graph."""
        net = Net()
        shape = (1, self.seq_len)
        ids, kinds, seen = (
            net.builder.input(name, shape, "int64") for name in ("ids", "token_type_ids", "attention_mask")
        )
        e = "embeddings"
        x = net.embedding(ids, f"{e}.word_embeddings", self.vocab_size, self.hidden)
        rows = max(self.positions, self.seq_len)
        places = net.embedding(net.positions(self.seq_len), f"{e}.position_embeddings", rows, self.hidden)
        x = net.add(x, net.embedding(kinds, f"{e}.token_type_embeddings", 2, self.hidden), e)
        x = net.layer_norm(net.add(x, places, e), f"{e}.LayerNorm", 1e-12)
        x = net.dropout(x, e, self.dropout_percent)
        for i in self.built:
            x = self._layer(net, x, seen, f"encoder.layer.{i}")
        head = "cls.predictions.transform"
        x = net.op("Gelu", [net.linear(x, f"{head}.dense", self.hidden)], head)
        logits = net.product(
            net.layer_norm(x, f"{head}.LayerNorm", 1e-12), f"{e}.word_embeddings.weight", "cls.predictions.decoder"
        )
        logits = net.add(logits, net.parameter("cls.predictions.bias", self.vocab_size), "cls.predictions.decoder")
        return self.stretched(net.finish(logits, loss=loss), "encoder.layer")

    def _layer(self, net: Net, x: str, seen: str, layer: str) -> str:
        scope = f"{layer}.attention.self"
        q, k, v = (net.linear(x, f"{scope}.{name}", self.hidden) for name in ("query", "key", "value"))
        q, k, v = (net.heads(t, scope, self.heads, transposed=t == k) for t in (q, k, v))
        y = net.attend(q, k, v, scope, masks=[self._mask(net, seen, scope)], dropout_percent=self.dropout_percent)
        y = net.linear(y, f"{layer}.attention.output.dense", self.hidden)
        y = net.dropout(y, f"{layer}.attention.output", self.dropout_percent)
        x = net.layer_norm(net.add(y, x, f"{layer}.attention.output"), f"{layer}.attention.output.LayerNorm", 1e-12)
        y = net.linear(x, f"{layer}.intermediate.dense", self.width)
        y = net.linear(net.op("Gelu", [y], f"{layer}.intermediate"), f"{layer}.output.dense", self.hidden)
        y = net.dropout(y, f"{layer}.output", self.dropout_percent)
        return net.layer_norm(net.add(y, x, f"{layer}.output"), f"{layer}.output.LayerNorm", 1e-12)

    def _mask(self, net: Net, seen: str, scope: str) -> str:
        """The padding mask; each layer computes it, since one mask for all layers would cross every stage boundary."""
        y = net.op("Cast", [net.op("Unsqueeze", [seen], scope, axes=(1, 2))], scope, to="float32")
        y = net.op("Sub", [net.scalar("one", 1.0), y], scope)
        return net.op("Mul", [y, net.scalar("lowest", LOWEST)], scope)


@dataclass(frozen=True, kw_only=True)
class Vit(Stack):
    """Encoder of image patches preceded by a class token, with a layer norm before attention and MLP."""

    image_size: int = 224
    patch_size: int = 16
    num_classes: int = 1000
    parallel: int = 0
    """1 = attention and MLP read the same norm in parallel, and queries and keys have norms (ViT-22B, arXiv
    2302.05442); 0 = the MLP follows attention."""

    def build(self, loss: str | None) -> Graph:
        """The graph."""
        net = Net()
        image = net.builder.input("image", (1, 3, self.image_size, self.image_size))
        x = net.conv(image, "patch_embed.proj", self.hidden, self.patch_size, stride=self.patch_size, bias=True)
        count = (self.image_size // self.patch_size) ** 2
        x = net.op("Reshape", [x], "patch_embed", shape=(1, self.hidden, count))
        x = net.op("Transpose", [x], "patch_embed", perm=(0, 2, 1))
        x = net.op("Concat", [net.parameter("cls_token", 1, 1, self.hidden), x], axis=1)
        x = net.add(x, net.parameter("pos_embed", 1, count + 1, self.hidden))
        for i in self.built:
            block = f"blocks.{i}"
            y, is_parallel = net.layer_norm(x, f"{block}.norm1", 1e-6), bool(self.parallel)
            z = net.fused_attention(y, f"{block}.attn", ("qkv", "proj"), self.heads, qk_norm=is_parallel)
            if not is_parallel:
                x = net.add(x, z, block)
                y = net.layer_norm(x, f"{block}.norm2", 1e-6)
            y = net.linear(y, f"{block}.mlp.fc1", self.width)
            y = net.linear(net.op("Gelu", [y], f"{block}.mlp.act"), f"{block}.mlp.fc2", self.hidden)
            x = net.add(x, net.add(y, z, block) if is_parallel else y, block)
        x = net.op("Gather", [net.layer_norm(x, "norm", 1e-6)], indices=0, axis=1)
        return self.stretched(net.finish(net.linear(x, "head", self.num_classes), loss=loss), "blocks")


@dataclass(frozen=True, kw_only=True)
class T5(Stack):
    """T5 1.0: encoder and decoder of `layers` layers each, with relative positions; the head shares the embedding."""

    head_size: int = 64
    seq_len: int = 512
    target_len: int = 0
    """Length of the decoder's sequence; 0 = `seq_len`."""
    vocab_size: int = 32128
    buckets: int = 32
    """Number of buckets for distances between positions."""

    def build(self, loss: str | None) -> Graph:
        """The graph."""
        net = Net()
        target_len = self.target_len or self.seq_len
        ids = net.builder.input("ids", (1, self.seq_len), "int64")
        decoded = net.builder.input("decoder_ids", (1, target_len), "int64")
        x = net.embedding(ids, "shared", self.vocab_size, self.hidden)
        for i in self.built:
            block = f"encoder.block.{i}"
            x = self._attention(net, x, x, f"{block}.layer.0", "SelfAttention", self._bias(net, "encoder", block, x))
            x = self._mlp(net, x, f"{block}.layer.1")
        memory = net.rms_norm(x, "encoder.final_layer_norm")
        mask = net.causal_mask(target_len)
        x = net.embedding(decoded, "shared", self.vocab_size, self.hidden)
        for i in self.built:
            block = f"decoder.block.{i}"
            bias = self._bias(net, "decoder", block, x)
            bias = net.add(bias, mask, f"{block}.layer.0.SelfAttention")
            x = self._attention(net, x, x, f"{block}.layer.0", "SelfAttention", bias)
            x = self._attention(net, x, memory, f"{block}.layer.1", "EncDecAttention", "")
            x = self._mlp(net, x, f"{block}.layer.2")
        x = net.rms_norm(x, "decoder.final_layer_norm")
        x = net.op("Mul", [x, net.scalar("head_scale", self.hidden**-0.5)])
        graph = net.finish(net.product(x, "shared.weight", "lm_head"), loss=loss)
        return self.stretched(self.stretched(graph, "encoder.block"), "decoder.block")

    def _bias(self, net: Net, side: str, block: str, x: str) -> str:
        """The bias of attention scores by distance.

        Encoder and decoder have one table each; every layer looks its bias up again, since one bias for all layers
        would cross every stage boundary.
        """
        length = net.shape(x)[1]
        distances = net.buffer(f"{side}.distances", length, length, dtype="int64")
        first = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"
        table = net.parameter(f"{first}.weight", self.buckets, self.heads)
        scope = f"{block}.layer.0.SelfAttention"
        y = net.op("Gather", [table, distances], f"{scope}.relative_attention_bias", axis=0)
        return net.op("Unsqueeze", [net.op("Transpose", [y], scope, perm=(2, 0, 1))], scope, axes=(0,))

    def _attention(self, net: Net, x: str, memory: str, layer: str, name: str, mask: str) -> str:
        y = net.rms_norm(x, f"{layer}.layer_norm")
        source = y if memory == x else memory
        scope, width = f"{layer}.{name}", self.heads * self.head_size
        q = net.heads(net.linear(y, f"{scope}.q", width, bias=False), scope, self.heads)
        k = net.heads(net.linear(source, f"{scope}.k", width, bias=False), scope, self.heads, transposed=True)
        v = net.heads(net.linear(source, f"{scope}.v", width, bias=False), scope, self.heads)
        y = net.attend(q, k, v, scope, masks=[mask] if mask else [], scale=False)
        return net.add(x, net.linear(y, f"{scope}.o", self.hidden, bias=False), layer)

    def _mlp(self, net: Net, x: str, layer: str) -> str:
        scope = f"{layer}.DenseReluDense"
        y = net.linear(net.rms_norm(x, f"{layer}.layer_norm"), f"{scope}.wi", self.width, bias=False)
        y = net.linear(net.op("Relu", [y], f"{scope}.act"), f"{scope}.wo", self.hidden, bias=False)
        return net.add(x, y, layer)
