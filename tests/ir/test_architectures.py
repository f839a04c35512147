"""Layouts and exporters' habits: sequence first, samples in indices, folded, merged and repeated weights."""

import functools
import io
import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from ort_oracle import compare
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ir.errors import ModelError
from ir.factors import placement_text
from ir.linkage import operator_signatures
from ir.onnx.load import load_model

VOCABULARY, LENGTH, WIDTH, HEADS = 50, 8, 16, 2


class Megatron(nn.Module):
    """Ids `[b, s]`, everything inside `[s, b, h]`, heads merged with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).transpose(0, 1).contiguous()
        s, b, h = x.shape
        parts = self.qkv(self.norm(x)).view(s, b, HEADS, 3 * h // HEADS).chunk(3, -1)
        q, k, v = (p.reshape(s, b * HEADS, h // HEADS).transpose(0, 1) for p in parts)
        scores = torch.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.3, -1)
        y = torch.bmm(scores, v).transpose(0, 1).reshape(s * b, h)
        x = x + functional.relu(self.out(y)).view(s, b, h)
        return self.head(x).transpose(0, 1)


class MergedHeads(nn.Module):
    """Products of attention on `[(b h), s, d]`; what is added to the scores is `[h, 1, s]` there (BLOOM's distances),
    or a mask while they are viewed as `[b, h, s, s]` (BART's, XGLM's)."""

    def __init__(self, *, mask: bool) -> None:
        super().__init__()
        self.embedding, self.mask = nn.Embedding(VOCABULARY, WIDTH), mask
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2).reshape(-1, LENGTH, WIDTH // HEADS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        q, k, v = self.split(self.q(x) * 0.3), self.split(self.k(x)), self.split(self.v(x))
        scores, n = torch.bmm(q, k.transpose(1, 2)), ids.shape[0]
        if self.mask:
            seen = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool))
            scores = scores.view(n, HEADS, LENGTH, LENGTH).masked_fill(~seen, -1e9).view(n * HEADS, LENGTH, LENGTH)
        else:
            distances = torch.arange(1.0, 1 + HEADS)[:, None, None] * torch.arange(LENGTH)
            scores = scores + distances.repeat(n, 1, 1)
        y = torch.bmm(torch.softmax(scores, -1), v).view(n, HEADS, LENGTH, WIDTH // HEADS)
        return self.out(y.transpose(1, 2).reshape(n, LENGTH, WIDTH))


class TwoMasks(nn.Module):
    """`nn.MultiheadAttention` that also makes its weights, in `[(b h), s, s]`: what is added to the scores there has
    the samples too, as where the keys of each sample and those of the future are masked, or a bias is gated (WavLM).
    """

    def __init__(self, *, batch_first: bool, gated: bool) -> None:
        super().__init__()
        self.embed, self.read = nn.Linear(WIDTH, WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
        self.gate = nn.Linear(WIDTH, HEADS) if gated else None
        self.order = (0, 1, 2) if batch_first else (1, 0, 2)
        self.register_buffer("future", torch.full((LENGTH, LENGTH), -1e9).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        x, padding, future = self.embed(x), x[:, :, 0] > 0.5, self.future
        if self.gate is not None:
            gates = torch.sigmoid(self.gate(x)).transpose(1, 2)
            padding, future = None, gates.reshape(-1, LENGTH, 1) * future
        y = x.permute(self.order)
        return x + self.read(y, y, y, key_padding_mask=padding, attn_mask=future)[0].permute(self.order)


class RelativeKeys(MergedHeads):
    """SpeechT5's encoder: keys of relative positions are multiplied with the queries in `[s, (b h), d]`."""

    def __init__(self) -> None:
        super().__init__(mask=False)
        self.positions = nn.Embedding(2 * LENGTH, WIDTH // HEADS)

    def forward(self, ids: Tensor) -> Tensor:
        x, n = self.embedding(ids), ids.shape[0]
        q, k, v = self.split(self.q(x) * 0.3), self.split(self.k(x)), self.split(self.v(x))
        keys = self.positions(torch.arange(LENGTH)[:, None] - torch.arange(LENGTH) + LENGTH)
        relative = torch.matmul(q.transpose(0, 1), keys.transpose(1, 2)).transpose(0, 1)
        scores = (torch.bmm(q, k.transpose(1, 2)) + relative).view(n, HEADS, LENGTH, LENGTH)
        weights = torch.softmax(scores, -1).view(n * HEADS, LENGTH, LENGTH)
        y = torch.bmm(weights, v).view(n, HEADS, LENGTH, WIDTH // HEADS)
        return self.out(y.transpose(1, 2).reshape(n, LENGTH, WIDTH))


class Encoder(nn.Module):
    """PyTorch's own encoder: copies of one layer, products on `[(s b), h]`."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=batch_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Speech(nn.Module):
    """Convolutions, then time first through a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.layers = nn.Conv2d(1, 4, 3, 2, 1), nn.GRU(4 * 4, 6, bidirectional=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.convolution(x))
        b, c, f, t = y.shape
        return self.head(self.layers(y.view(b, c * f, t).permute(2, 0, 1))[0]).transpose(0, 1)


class Pooled(nn.Module):
    """A look-up by each sample in its own rows, as CLIP takes its end-of-text token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(x[torch.arange(x.shape[0]), ids.argmax(-1)])


class Shifted(nn.Module):
    """Writes into a slice of fresh zeros, as T5 shifts its labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor) -> Tensor:
        shifted = ids.new_zeros(ids.shape)
        shifted[..., 1:] = ids[..., :-1].clone()
        return self.head(self.embedding(shifted))


class Bags(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(20, 4, mode=mode) for _ in range(2)])
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1))


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.rand(WIDTH, HEADS, 8)), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.einsum("...d,dhe->...he", x, self.weight).flatten(-2))


class Normalised(nn.Module):
    """Convolutions that the exporters fold batch normalisations into."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False),
            nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Repeated(nn.Module):
    """One layer that runs three times (ALBERT)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = functional.relu(self.layer(x))
        return self.head(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.ConvTranspose2d(4, 3, 2, 2), nn.Conv2d(6, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        z = functional.interpolate(x[:, :3], size=y.shape[2:], mode="bilinear", align_corners=False)
        return self.head(torch.cat((y, functional.pad(z[..., 1:], (0, 1))), 1))


class Unrolled(nn.Module):
    """A recurrent cell in a loop, its first state made for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.new_zeros(x.shape[0], 2 * WIDTH), x.new_zeros(x.shape[0], 2 * WIDTH)
        for t in range(3):
            h, c = self.cell(x[:, t], (h, c))
        return self.head(h)


class RelativePlaces(nn.Module):
    """XLNet: sequence first, what is known of places repeated for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.q, self.r = (nn.Parameter(torch.ones(WIDTH, HEADS, WIDTH // HEADS)) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids.transpose(0, 1))
        angles = torch.arange(2.0 * LENGTH)[:, None] * torch.arange(1.0, 1 + WIDTH)
        places = angles.sin()[:, None].expand(-1, ids.shape[0], -1)
        q, r = (torch.einsum("ibh,hnd->ibnd", y, w) for y, w in ((x, self.q), (places, self.r)))
        return torch.einsum("ibnd,jbnd->bnij", q, r).sum((1, 3))


class Prepared(nn.Module):
    """Kinds of tokens, a class token and a mask on scores of distances, each made for all samples of the export."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.kinds = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(2, WIDTH)
        self.start, self.distances = nn.Parameter(torch.ones(WIDTH)), nn.Embedding(LENGTH + 1, 1)

    def forward(self, ids: Tensor) -> Tensor:
        n, length = len(ids), LENGTH + 1
        x = self.embedding(ids) + self.kinds(torch.zeros_like(ids))
        x = torch.cat((self.start.expand(n, 1, -1), x), 1)
        far = (torch.arange(length)[:, None] - torch.arange(length)).abs()
        scores = self.distances(far)[..., 0][None] + torch.zeros(n, length, length).masked_fill(far > 2, -1e9)
        return torch.softmax(x @ x.transpose(1, 2) + scores, -1) @ x


class Contrastive(nn.Module):
    """Samples against each other; the loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.a(x[:, 0]) @ self.b(x[:, 1]).t()
        own = torch.arange(scores.shape[0])
        return functional.cross_entropy(scores, own) + functional.cross_entropy(scores.t(), own)


class Latents(nn.Module):
    """Learned queries that all samples share, which read the data first or each other first."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.latents, self.queries = nn.Parameter(torch.randn(5, WIDTH)), nn.Parameter(torch.randn(3, WIDTH))
        self.read = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 32, batch_first=batch_first)
        self.batch = 0 if batch_first else 1
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[self.batch]
        latents = self.latents[None].expand(n, -1, -1) if self.batch == 0 else self.latents[:, None].expand(-1, n, -1)
        # As DETR writes it.
        queries = self.queries.unsqueeze(self.batch).repeat(*(n if d == self.batch else 1 for d in range(3)))
        x = self.read(latents, x, x, need_weights=False)[0] + latents
        return self.head(self.decoder(queries, x))


class Written(nn.Module):
    """Writes to slices: of one dim, of two dims, and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.one(x), self.two(x)
        y[:, 1:] += z[:, 1:]
        y[:, 2:-1, : WIDTH // 2] = z[:, 1:-2, : WIDTH // 2]
        y[:, :, :] *= self.three(x)
        return torch.softmax(y, -1)


class Probe(nn.Module):
    """One learned query that pools the data."""

    def __init__(self) -> None:
        super().__init__()
        self.probe, self.read = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.MultiheadAttention(WIDTH, HEADS)
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.transpose(0, 1))
        return self.head(self.read(self.probe.expand(-1, x.shape[1], -1), x, x, need_weights=False)[0][0])


def ids(n: int) -> Tensor:
    return torch.zeros(n, LENGTH, dtype=torch.long)


def sequence(n: int) -> Tensor:
    return torch.zeros(n, LENGTH, WIDTH)


BUILDERS = {
    "megatron": (Megatron, ids, 0),
    "merged_heads": (lambda: MergedHeads(mask=True), ids, 0),
    "relative_keys": (RelativeKeys, ids, 0),
    "two_masks": (lambda: TwoMasks(batch_first=True, gated=False), sequence, 0),
    "gated_bias": (lambda: TwoMasks(batch_first=False, gated=True), sequence, 0),
    "encoder": (lambda: Encoder(batch_first=True), sequence, 0),
    "encoder_sequence_first": (lambda: Encoder(batch_first=False), lambda n: torch.zeros(LENGTH, n, WIDTH), 1),
    "one_token": (lambda: Encoder(batch_first=True), lambda n: torch.zeros(n, 1, WIDTH), 0),
    "speech": (Speech, lambda n: torch.zeros(n, 1, 8, 12), 0),
    "pooled": (Pooled, ids, 0),
    "shifted": (Shifted, ids, 0),
    "bags_sum": (lambda: Bags("sum"), lambda n: torch.zeros(n, 2, 3, dtype=torch.long), 0),
    "bags_mean": (lambda: Bags("mean"), lambda n: torch.zeros(n, 2, 3, dtype=torch.long), 0),
    "ellipsis": (Einsum, sequence, 0),
    "normalised": (Normalised, lambda n: torch.zeros(n, 3, 8, 8), 0),
    "repeated": (Repeated, sequence, 0),
    "written": (Written, sequence, 0),
    "residual": (Residual, lambda n: torch.zeros(n, 4, 6, 6), 0),
}
WITH_CONSTANTS = {
    "unrolled": (Unrolled, sequence, 0),
    "relative_places": (RelativePlaces, ids, 0),
    "prepared": (Prepared, ids, 0),
    "distances": (lambda: MergedHeads(mask=False), ids, 0),
    "contrastive": (Contrastive, sequence, 0),
    "latents": (lambda: Latents(batch_first=True), sequence, 0),
    "latents_sequence_first": (lambda: Latents(batch_first=False), lambda n: torch.zeros(LENGTH, n, WIDTH), 1),
    "probe": (Probe, sequence, 0),
}
MODULES = BUILDERS | WITH_CONSTANTS
NOT_COMPARED = {"bags_sum", "bags_mean", "normalised"}
"""onnxruntime refuses the loops of the first two; the exporter merged the norms of the last into convolutions."""
BATCHED = [n for n in BUILDERS if not n.startswith("bags")]


def build(name: str, batch: int) -> tuple[nn.Module, Tensor, int]:
    factory, inputs, place = MODULES[name]
    torch.manual_seed(0)
    return factory().eval(), inputs(batch), place


@functools.cache
def export(name: str, batch: int, *, symbolic: bool = False, weights: bool = True, opset: int = 17) -> bytes:
    """By PyTorch's older exporter, which takes a tenth of a second."""
    module, data, place = build(name, batch)
    out = io.BytesIO()
    axes = {"data": {place: "batch"}} if symbolic else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (data,), out, dynamo=False, opset_version=opset, input_names=["data"], dynamic_axes=axes,
            export_params=weights,
        )  # fmt: skip
    return out.getvalue()


def load(name: str, batch: int, **options: object):
    return load_model(export(name, batch, **options), batch_dims={"data": MODULES[name][2]})


def flops(name: str) -> float:
    """Counted by PyTorch on kernels that it takes apart (no fused attention, no fused recurrent layer)."""
    module, data, _ = build(name, 1)
    module.requires_grad_(False)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore")
            with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
                module(data)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops()


def structure(graph):
    """Everything but names: the older exporter numbers what it folds."""

    def sizes(names):
        return [(graph.tensors[n].shape, graph.tensors[n].batch_dim, graph.tensors[n].role) for n in names]

    return [(op.kind, sizes(op.inputs), sizes(op.outputs), op.rule, op.forward_flops) for op in graph]


@pytest.mark.parametrize("name", BUILDERS)
def test_parameters_and_flops(name):
    graph = load(name, 1)
    module, _, _ = build(name, 1)
    assert graph.num_parameters == sum(p.numel() for p in module.parameters())
    assert graph.forward_flops == pytest.approx(flops(name), rel=0.01)
    assert not graph.warnings


@pytest.mark.parametrize("name", [n for n in MODULES if n not in NOT_COMPARED])
def test_onnxruntime_agrees(name):
    assert compare(export(name, 1), batch_dims={"data": MODULES[name][2]}) < 1e-5


@pytest.mark.parametrize("name", BATCHED)
def test_batch_one_four_and_symbolic_are_equal(name):
    one = structure(load(name, 1))
    assert structure(load(name, 4)) == one
    assert structure(load(name, 2, symbolic=True)) == one


@pytest.mark.parametrize("batch", [1, 4])
def test_products_with_relative_positions_split_heads_too(batch):
    graph = load("relative_keys", batch)
    products = [op for op in graph if op.kind == "MatMul" and len(graph.tensors[op.outputs[0]].shape) == 4]
    assert len(products) == 3
    for op in products:
        assert HEADS in {f.size for f in op.rule.factors if not f.fixed and not f.is_batch}, op.name


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", ["merged_heads", "distances", "megatron"])
def test_heads_that_are_merged_with_samples_can_be_split(name, batch):
    graph = load(name, batch)
    products = [op for op in graph if op.kind == "MatMul" and graph.tensors[op.outputs[0]].shape[:2] == (1, HEADS)]
    assert len(products) == 2
    for op in products:
        assert {("S(0)",), ("S(1)",)} <= {tuple(map(placement_text, s.outputs)) for s in operator_signatures(graph, op)}


@pytest.mark.parametrize("name", BATCHED)
def test_every_product_divides_by_samples(name):
    for op in load(name, 4):
        if op.forward_flops.at(1) and not op.is_constant:
            assert op.forward_flops.per_sample and not op.forward_flops.fixed, op.name
            assert all(
                dims[0] == i for dims_of in op.rule.outputs for dims in dims_of for i in dims if _is_batch(op, i)
            )


def _is_batch(op, index):
    return op.rule.factors[index].is_batch


@pytest.mark.parametrize("name", WITH_CONSTANTS)
def test_constants_made_for_each_exported_sample(name):
    """What is alike for all samples is computed once, whatever batch the file was exported at."""
    one = load(name, 1)
    assert structure(load(name, 4)) == structure(one)
    assert one.forward_flops == pytest.approx(flops(name), rel=0.01)


@pytest.mark.parametrize(("batch", "symbolic"), [(1, False), (4, False), (2, True)])
@pytest.mark.parametrize(
    ("name", "shared"),
    [
        # Products of five latents; products of three queries, and their scores and sums over each other.
        ("latents_sequence_first", 2 * 5 * WIDTH**2 + 5 * 2 * 3 * WIDTH**2 + 2 * 2 * 3 * 3 * WIDTH),
        ("probe", 2 * WIDTH**2),
    ],
)
def test_queries_that_all_samples_share(name, shared, batch, symbolic):
    """Only what queries do before they meet the data depends on no sample."""
    graph = load(name, batch, symbolic=symbolic)
    of_samples = sum(op.forward_flops.per_sample for op in graph)
    assert of_samples == pytest.approx(flops(name) - shared, rel=0.01)
    assert graph.tensors[graph.outputs[0]].batch_dim == MODULES[name][2]
    module, _, _ = build(name, 1)
    assert graph.num_parameters == sum(p.numel() for p in module.parameters())


def test_slices_are_known_without_their_indices(monkeypatch):
    """The indices of a large slice are not computed: one tuple for each element."""
    computed = load("written", 4, symbolic=True)
    monkeypatch.setattr("ir.onnx.load.MAX_FOLDED", LENGTH * WIDTH)
    monkeypatch.setattr("ir.onnx.load.SMALL_VALUE", 2 * LENGTH)
    graph = load("written", 4, symbolic=True)
    assert {op.kind for op in graph if "Scatter" in op.kind} == set()
    assert structure(graph) == structure(computed)


@pytest.mark.parametrize("name", ["residual", "normalised", "speech"])
def test_weight_free_file_of_the_older_exporter(name):
    graph = load_model(export(name, 2, weights=False))
    module, _, _ = build(name, 1)
    assert graph.num_parameters == sum(p.numel() for p in module.parameters())
    assert not graph.warnings


@pytest.mark.parametrize("opset", [9, 13])
def test_older_operator_sets(opset):
    assert load("normalised", 2, opset=opset).num_parameters == load("normalised", 1).num_parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder", "normalised"])
def test_fresh_weights_that_the_newer_exporter_merges(name):
    from automap.runtime.torch_export import quiet

    module, data, _ = build(name, 2)
    with quiet():
        program = torch.onnx.export(module, (data,), dynamo=True, verbose=False, opset_version=18)
    graph = load_model(program.model_proto.SerializeToString())
    # It drops biases of zeros: those of the attention.
    dropped = sum(p.numel() for n, p in module.named_parameters() if n.endswith(("in_proj_bias", "out_proj.bias")))
    missing = sum(p.numel() for p in module.parameters()) - graph.num_parameters
    assert 0 <= missing <= dropped
    assert graph.forward_flops == pytest.approx(flops(name), rel=0.01)


def branching(condition: onnx.NodeProto | None) -> bytes:
    branches = [
        helper.make_graph(
            [helper.make_node(kind, ["y"], [f"{kind}_out"])],
            kind,
            [],
            [helper.make_empty_tensor_value_info(f"{kind}_out")],
        )
        for kind in ("Relu", "Tanh")
    ]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    if condition is not None:
        nodes.append(condition)
    nodes.append(helper.make_node("If", ["c"], ["z"], name="fork", then_branch=branches[0], else_branch=branches[1]))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])]
    if condition is None:
        inputs.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    graph = helper.make_graph(
        nodes, "g", inputs, [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [helper.make_tensor("w", TensorProto.FLOAT, [4, 4], np.arange(16.0))],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()


@pytest.mark.parametrize(("value", "kind"), [(True, "Relu"), (False, "Tanh")])
def test_a_known_condition_takes_its_branch(value, kind):
    tensor = helper.make_tensor("t", TensorProto.BOOL, [], [value])
    graph = load_model(branching(helper.make_node("Constant", [], ["c"], value=tensor)))
    assert [op.kind for op in graph] == ["MatMul", kind]


def test_an_unknown_condition_is_refused_by_name():
    with pytest.raises(ModelError, match="If depends on data") as error:
        load_model(branching(None))
    assert error.value.value == "fork"


def with_sequences(nodes, output="z") -> bytes:
    """A product `y` of `[2, 4]` and `[4, 3]`, and `nodes` behind it; `one` is the number 1."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"]), *nodes],
        "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [helper.make_tensor("w", TensorProto.FLOAT, [4, 3], np.arange(12.0)),
         helper.make_tensor("one", TensorProto.INT64, [], [1])],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()


def test_sequences_of_known_length():
    nodes = [
        helper.make_node("SplitToSequence", ["y"], ["parts"], axis=1, keepdims=1),
        helper.make_node("SequenceAt", ["parts", "one"], ["second"]),
        helper.make_node("SequenceConstruct", ["second", "y"], ["both"]),
        helper.make_node("ConcatFromSequence", ["both"], ["z"], axis=1),
    ]
    assert load_model(with_sequences(nodes)).tensors["z"].shape_at(5) == (5, 4)


def test_a_sequence_where_a_tensor_is_needed_is_refused_by_name():
    both = helper.make_node("SequenceConstruct", ["y", "y"], ["both"])
    with pytest.raises(ModelError, match="an output of the model is a sequence of 2 tensors") as error:
        load_model(with_sequences([both], "both"))
    assert error.value.value == "both"
    with pytest.raises(ModelError, match=r"an operand of act \(Relu\) is a sequence") as error:
        load_model(with_sequences([both, helper.make_node("Relu", ["both"], ["z"], "act")]))
    assert error.value.value == "both"


def looked_up(batch: int, places: list[int]) -> bytes:
    """`y[arange(b)[:, None, None], places]` as the newer exporter writes it."""
    pairs = np.array([[[[sample, place] for place in places]] for sample in range(batch)])
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("GatherND", ["y", "pairs"], ["z"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3, 4])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [
            helper.make_tensor("w", TensorProto.FLOAT, [4, 5], np.arange(20.0)),
            helper.make_tensor("pairs", TensorProto.INT64, pairs.shape, pairs.reshape(-1)),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()


@pytest.mark.parametrize(("places", "kind"), [([0, 1, 2], "Reshape"), ([2, 0], "Gather")])
def test_pairs_of_sample_and_place_look_up_in_each_sample(places, kind):
    graphs = [load_model(looked_up(batch, places)) for batch in (1, 3)]
    assert structure(graphs[0]) == structure(graphs[1])
    operator = graphs[0].operators[-1]
    assert operator.kind == kind
    assert graphs[0].tensors["z"].shape_at(3) == (3, 1, len(places), 5)
    assert not operator.rule.factors[operator.rule.outputs[0][0][0]].fixed


class Outermost(nn.Module):
    """Parameters of the outermost module, whose names have no dots, and numbers that are computed from one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.latents = nn.Parameter(torch.rand(6, WIDTH)), nn.Parameter(torch.rand(LENGTH, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        distances = x @ self.places.T + self.places.pow(2).sum(1) * torch.arange(6)
        return self.head(distances * self.latents.exp() + torch.tensor([2.0, 1.0, 2.0, 3.0, 1.0, 2.0]))


def test_parameters_of_the_outermost_module_are_found_once():
    module = Outermost()
    dim = torch.export.Dim("batch", min=1, max=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module, (torch.rand(2, LENGTH, WIDTH),), dynamo=True, dynamic_shapes=({0: dim},))
    graph = load_model(program.model_proto.SerializeToString())
    assert graph.num_parameters == sum(p.numel() for p in module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("exporter", ["automap", "optimised", "plain"])
def test_convolutions_of_videos_without_bias(exporter):
    """The newer exporter gives them zeros of two dims as a bias; in a plain export they are made by operators."""
    from automap.runtime.torch_export import export_onnx, quiet

    def build():
        norm = nn.InstanceNorm3d(6, affine=True)
        return nn.Sequential(nn.Conv3d(3, 6, 3, bias=False), norm, nn.ReLU()), (torch.zeros(1, 3, 4, 8, 8),)

    module, inputs = build()
    if exporter == "automap":
        data = export_onnx(build)
    else:
        with quiet():
            program = torch.onnx.export(
                module.eval(), inputs, dynamo=True, optimize=exporter == "optimised", verbose=False, opset_version=20
            )
        data = program.model_proto.SerializeToString()
    with FlopCounterMode(display=False) as counted:
        module(*inputs)
    graph = load_model(data)
    assert graph.num_parameters == sum(p.numel() for p in module.parameters())
    assert graph.forward_flops == counted.get_total_flops()
