"""How trainers run a graph: number formats against torch's own autocast, kernels, and what they cost."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from automap.cluster import parse_cluster
from automap.execution import FULL, HALF, IN_FULL, IN_HALF, execution
from automap.price.estimate import price
from automap.price.evaluator import Evaluator
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.space.stated_strategy import Strategy, hand_made
from ir import zoo
from ir.build import GraphBuilder
from ir.loss import with_loss

FUNCTIONS = {
    "MatMul": lambda x: x @ x.mT,
    "Einsum": lambda x: torch.einsum("abcd,abde->abce", x, x.mT),
    "Attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "Conv": lambda x: F.conv2d(x, torch.empty(3, 2, 1, 1, device="cuda")),
    "ConvTranspose": lambda x: F.conv_transpose2d(x, torch.empty(2, 3, 1, 1, device="cuda")),
    "Pow": lambda x: torch.pow(x, 3),
    "Exp": torch.exp,
    "Log": torch.log,
    "Reciprocal": torch.reciprocal,
    "Softplus": F.softplus,
    "Softmax": lambda x: torch.softmax(x, -1),
    "LogSoftmax": lambda x: torch.log_softmax(x, -1),
    "LayerNormalization": lambda x: F.layer_norm(x, (8,)),
    "RMSNormalization": lambda x: F.rms_norm(x, (8,)),
    "GroupNormalization": lambda x: F.group_norm(x, 1),
    "InstanceNormalization": F.instance_norm,
    "LpNormalization": F.normalize,
    "ReduceSum": torch.sum,
    "ReduceProd": torch.prod,
    "ReduceMean": torch.mean,
    "ReduceMax": torch.amax,
    "ReduceL1": lambda x: torch.linalg.vector_norm(x, 1),
    "ReduceL2": lambda x: torch.linalg.vector_norm(x, 2),
    "ReduceLogSumExp": lambda x: torch.logsumexp(x, 0),
    "CumSum": lambda x: torch.cumsum(x, 0),
    "CumProd": lambda x: torch.cumprod(x, 0),
    "Acos": torch.acos,
    "Asin": torch.asin,
    "Cosh": torch.cosh,
    "Sinh": torch.sinh,
    "Tan": torch.tan,
    "Sin": torch.sin,
    "Cos": torch.cos,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "Sqrt": torch.sqrt,
    "Erf": torch.erf,
    "Relu": torch.relu,
    "Gelu": F.gelu,
    "Swish": F.silu,
    "Mish": F.mish,
    "HardSwish": F.hardswish,
    "Elu": F.elu,
    "Dropout": F.dropout,
    "AveragePool": lambda x: F.avg_pool2d(x, 2),
    "Resize": lambda x: F.interpolate(x, scale_factor=2),
    "Mul": lambda x: x * 0.5,
    "Add": lambda x: x + x,
    "Where": lambda x: torch.where(x > 0, x, x),
    "Concat": lambda x: torch.cat([x, x]),
}
"""Kinds of ONNX and what torch calls them."""


@pytest.fixture(scope="module")
def autocast():
    """torch.autocast for CUDA in bf16, on tensors without data; torch need not be built for it."""
    with (
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        mock.patch("torch.cuda.is_bf16_supported", lambda *_, **__: True),
        FakeTensorMode(),
        torch.autocast("cuda", torch.bfloat16),
    ):
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_results_have_the_format_of_autocast(autocast, kind, dtype):
    found = FUNCTIONS[kind](torch.empty(1, 2, 4, 8, device="cuda", dtype=dtype)).dtype
    wanted = HALF if kind in IN_HALF else FULL if kind in IN_FULL else float(dtype.itemsize)
    assert float(found.itemsize) == wanted


def problem(graph, trainer="ddp", **training):
    settings = {"global_batch": 4, "precision": "bf16", "trainer": trainer, **training}
    return Problem.build(graph, parse_cluster("1xH200"), settings)


def gpt(hidden=64, vocab=128):
    return zoo.build(f"gpt:layers=4,hidden={hidden},heads=4,seq_len=32,vocab_size={vocab}")


def test_a_residual_stream_is_in_float32_and_is_converted_for_each_product():
    case = problem(gpt())
    found = execution(case)
    by_name = {op.name: (i, op) for i, op in enumerate(case.graph.operators)}
    for name, width in (("h.0/Add", FULL), ("h.0.mlp.c_fc/MatMul", HALF), ("h.0.attn.c_attn/Add#q", HALF)):
        assert found.widths[by_name[name][1].outputs[0]] == width, name
    for name, converted in (("h.0.attn.c_attn/MatMul#q", 1), ("h.0.mlp.c_fc/MatMul", 1), ("h.0.mlp.c_proj/MatMul", 0)):
        assert len(found.casts.get(by_name[name][0], ())) == converted, name


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_nothing_is_converted_without_lower_precision(precision):
    found = execution(problem(gpt(), precision=precision))
    assert not found.widths
    assert not found.casts


def test_a_layer_keeps_what_eager_pytorch_keeps():
    """In bytes for each of sequence x batch x hidden: both norms their inputs (4 + 4), the products copies of what
    norms made (2 + 2), attention q, k, v and its result (8), the GELU what it reads and the last product what it made
    (8 + 8)."""
    evaluator = Evaluator(problem(gpt()))
    lowered = hand_made(evaluator, Strategy(micro_batch=4))
    calls, parts = evaluator.distinct_units(lowered)
    middle = max(parts, key=lambda part: int(part.times)).row
    kept = float(evaluator.unit_costs(lowered, calls)[middle].saved_bytes)
    assert kept / (32 * 4 * 64) == pytest.approx(36.0)


def chain(kind):
    """A product, a chain of small operators as exporters write it, and a product."""
    b = GraphBuilder()
    x = b.input("x", (1, 16, 32))
    (x,) = b.add("MatMul", [x, b.parameter("w", (32, 32))], ["x0"])
    if kind == "silu":
        (s,) = b.add("Sigmoid", [x], ["s"])
        (y,) = b.add("Mul", [x, s], ["y"])
    elif kind == "gated silu":
        (s,) = b.add("Sigmoid", [x], ["s"])
        (a,) = b.add("Mul", [x, s], ["a"])
        (g,) = b.add("MatMul", ["x0", b.parameter("g", (32, 32))], ["g0"])
        (y,) = b.add("Mul", [a, g], ["y"])
    else:
        (p,) = b.add("Mul", [x, x], ["p"])
        (t,) = b.add("Tanh", [p], ["t"])
        (y,) = b.add("Mul", [x, t], ["y"])
    (z,) = b.add("MatMul", [y, b.parameter("v", (32, 32))], ["z"])
    return with_loss(b.finish([z], name=kind))


@pytest.mark.parametrize(("kind", "alone"), [("silu", 2), ("gated silu", 2), ("tanh", 0)])
def test_only_functions_of_pytorch_are_one_kernel(kind, alone):
    graph = chain(kind)
    sizes = [sum(len(k.members) for k in execution(problem(graph, t)).kernels if k.kind == "activation")
             for t in ("ddp", "generic")]  # fmt: skip
    assert sizes[0] == alone
    assert sizes[1] == (2 if kind == "silu" else 3)


CLIPPED = "moe:layers=1,hidden=64,heads=4,ffn=96,experts=4,top_k=2,seq_len=32,vocab_size=128,clipped=1"


@pytest.mark.parametrize(("trainer", "apart"), [("megatron-core", 3), ("megatron-core-26.06", 0), ("torchtitan", 0)])
def test_megatron_clips_in_front_of_its_kernel(trainer, apart):
    """Three operators clip the gate and the other half; what follows stays one kernel that keeps what it reads."""
    graph = zoo.build(CLIPPED)
    found = execution(problem(graph, trainer))
    kernels = [k for k in found.kernels if k.kind == "activation"]
    members = {i for k in kernels for i in k.members}
    clipping = {i for i, op in enumerate(graph.operators) if op.kind in ("Min", "Max")}
    assert len(clipping) == 3 and len(clipping - members) == apart
    assert len(members) == 8 - apart
    made = {name for i in members for name in graph.operators[i].outputs}
    read = {name for i in members for name in graph.operators[i].inputs if not graph.maker(name).is_constant} - made
    kept = {name for k in kernels for name in k.saved} - made
    assert kept <= read and (not apart or kept == read)
    assert bool(found.slower) == bool(apart)


class Counted(TorchDispatchMode):
    """Counts the elements of matrices that operators read and write; views move nothing."""

    moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view:
            found = (x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor) and x.dim() == 2)
            self.moved += sum(x.numel() for x in found if min(x.shape) > 1)
        return out


def test_biases_of_the_last_products_move_what_pytorch_moves():
    """Megatron-Core's way: each expert's bias times the weights of its tokens, added to them, and all concatenated."""
    tokens, weights = torch.ones(64, 32, requires_grad=True), torch.ones(64, 1, requires_grad=True)
    given = torch.ones(64, 32)
    biases = [torch.ones(32, requires_grad=True) for _ in range(4)]
    with Counted() as forward:
        parts = zip(torch.split(tokens, 16), biases, torch.split(weights, 16), strict=True)
        out = torch.cat([t + b * p for t, b, p in parts])
    with Counted() as backward:
        torch.autograd.grad(out, [tokens, weights, *biases], given)
    graph = zoo.build(CLIPPED)
    ((index, factors),) = execution(problem(graph, "megatron-core")).slower.items()
    # A traffic of 1 is the product read and the sum written.
    traffic = [2.0 * a * b for a, b in zip(factors, graph.operators[index].traffic, strict=True)]
    assert [forward.moved / tokens.numel(), backward.moved / tokens.numel()] == traffic


def step(graph, trainer="ddp", **training):
    case = problem(graph, trainer, **training)
    evaluator = Evaluator(case)
    return price(case, to_plan(hand_made(evaluator, Strategy(micro_batch=4)), evaluator), evaluator).step_time_s


def test_rows_that_tensor_cores_do_not_take_are_slow():
    """Only in products of trainers that pad nothing, and not without tensor cores."""
    even, odd = (zoo.build(f"gpt:layers=1,hidden=1024,heads=8,seq_len=2048,vocab_size={v}") for v in (50264, 50257))
    assert step(odd) > 1.1 * step(even)
    assert step(odd, "generic") == pytest.approx(step(even, "generic"), rel=0.01)
    assert step(odd, precision="fp32") == pytest.approx(step(even, precision="fp32"), rel=0.02)


@pytest.mark.parametrize(("trainer", "converts"), [("ddp", True), ("automap-modules", True), ("deepspeed", False)])
def test_gradients_travel_as_torch_makes_them(trainer, converts):
    """Under autocast weights, and so their gradients, stay in fp32; a model of 16 bits has gradients of 16 bits."""
    dtype = torch.float32 if converts else torch.bfloat16
    layer = torch.nn.Linear(4, 4, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=converts):
        layer(torch.ones(2, 4, dtype=dtype)).sum().backward()
    training = {"global_batch": 8, "precision": "fp16", "trainer": trainer}
    settings = Evaluator(Problem.build(zoo.build("gpt2"), "8xV100-16GB", training)).settings(0)
    assert settings.sent_gradient_bytes == layer.weight.grad.element_size()


@pytest.mark.parametrize(
    ("trainer", "precision", "sent", "kept"),
    [("deepspeed", "bf16", 2, 4), ("deepspeed", "fp8", 2, 4), ("deepspeed", "fp32", 4, 4), ("torchtitan", "bf16", 4, 4),
     ("megatron-core", "bf16", 2, 2), ("fsdp", "fp16", 2, 4)],
)  # fmt: skip
def test_bf16_gradients_travel_as_they_are_kept_except_in_deepspeed(trainer, precision, sent, kept):
    training = {"global_batch": 8, "precision": precision, "trainer": trainer}
    settings = Evaluator(Problem.build(zoo.build("gpt2"), "8xH100", training)).settings(0)
    assert (settings.sent_gradient_bytes, settings.gradient_bytes) == (sent, kept)


def batch_norms(device, precision):
    """Time of a batch normalisation over that of its bytes, by the multiples that its kernels have."""
    problem = Problem.build(
        zoo.build("resnet:blocks=1-1,width=8"),
        f"1x{device}",
        {"global_batch": 1, "precision": precision, "trainer": "ddp"},
    )
    slower = execution(problem).slower
    found = {
        slower.get(i, (1.0, 1.0)) for i, op in enumerate(problem.graph.operators) if op.kind == "BatchNormalization"
    }
    return found.pop() if len(found) == 1 else found


def test_native_batch_norm_is_bound_by_multiprocessors():
    """PyTorch's own kernel is the slow one: 5.3 times on the measured device, less where memory is slower beside the
    multiprocessors, and the same whatever products run in; cuDNN's takes fp16 and fp32."""
    assert batch_norms("H200", "bf16") == (5.3, 5.3)
    assert batch_norms("B200", "bf16") == (5.3, 5.3)
    assert batch_norms("RTX4090", "bf16")[0] == pytest.approx(5.3 * (1008 / 128) / (4800 / 132))
    for device in ("H200", "H100", "L40S"):
        assert batch_norms(device, "fp8") == batch_norms(device, "bf16")
        assert batch_norms(device, "fp16") == batch_norms(device, "fp32") == (1.0, 1.0)
