"""Pipelines without plans, which every rank runs one after the other and compares with one process."""

import functools

import runtime_ranks
import torch.distributed as dist
from small_graphs import build_gpt
from stage_programs import PlainStage, random_data, random_values

from automap.runtime.executor.action_order import Action
from automap.runtime.executor.pipeline import Pipeline
from automap.runtime.executor.routes import StageBorder, global_order
from automap.runtime.operators import apply as interpreter
from automap.schedule import A_CHUNK, A_MICRO_BATCH, A_WORD, KINDS, arrange, read_order
from ir.build import GraphBuilder
from ir.loss import with_loss

VOCAB = 32


def skipping():
    """A residual over two layers, a mask of the input that each layer reads, and a weight used by two layers."""
    b = GraphBuilder()
    x = b.input("x", (1, 8))
    w = b.parameter("w", (8, 8))
    zero = b.parameter("zero", (8,))
    (mask,) = b.add("Greater", [x, zero], ["mask"], opset=20)
    (h0,) = b.add("MatMul", [x, w], ["h0"], opset=20)
    (h1,) = b.add("Tanh", [h0], ["h1"], opset=20)
    (h2,) = b.add("MatMul", [h1, b.parameter("v", (8, 8))], ["h2"], opset=20)
    (h3,) = b.add("Where", [mask, h2, h1], ["h3"], opset=20)
    (h4,) = b.add("MatMul", [h3, w], ["h4"], opset=20)
    (h5,) = b.add("Tanh", [h4], ["h5"], opset=20)
    (h6,) = b.add("Add", [h5, h0], ["h6"], opset=20)
    (h7,) = b.add("Where", [mask, h6, h5], ["h7"], opset=20)
    (y,) = b.add("MatMul", [h7, b.parameter("head", (8, VOCAB))], ["y"], opset=20)
    return with_loss(b.finish([y], name="skipping"))


def one_weight():
    """Four layers that share their weight, as those of ALBERT do."""
    b = GraphBuilder()
    x, w = b.input("x", (1, 8)), b.parameter("w", (8, 8))
    for number in range(4):
        (x,) = b.add("MatMul", [x, w], [f"h{number}"], opset=20)
        (x,) = b.add("Add", [x, b.parameter(f"b{number}", (8,))], [f"a{number}"], opset=20)
        (x,) = b.add("Tanh", [x], [f"t{number}"], opset=20)
    (y,) = b.add("MatMul", [x, b.parameter("head", (8, VOCAB))], ["y"], opset=20)
    return with_loss(b.finish([y], name="one weight"))


def convolutional():
    b = GraphBuilder()
    x = b.input("x", (1, 3, 8, 8))
    pads = {"pads": (1, 1, 1, 1)}
    (x,) = b.add("Conv", [x, b.parameter("c0", (4, 3, 3, 3)), b.parameter("b0", (4,))], ["h0"], attributes=pads)
    (x,) = b.add("Relu", [x], ["h1"])
    strides = {**pads, "strides": (2, 2), "group": 2}
    (x,) = b.add("Conv", [x, b.parameter("c1", (6, 2, 3, 3))], ["h2"], attributes=strides)
    (x,) = b.add("Flatten", [x], ["h3"], attributes={"axis": 1})
    (x,) = b.add("Gemm", [x, b.parameter("g", (VOCAB, 96))], ["y"], attributes={"transB": 1})
    return with_loss(b.finish([x], name="convolutional"))


GRAPHS = {"gpt": lambda: build_gpt(hidden=16, seq=8, vocab=VOCAB), "skipping": skipping,
          "convolutional": convolutional, "one weight": one_weight}  # fmt: skip

CASES = {
    "one": ("gpt", [], [[0]], "1f1b"),
    "two, 1f1b": ("gpt", ["h.0.x2"], [[0], [1]], "1f1b"),
    "two, gpipe": ("gpt", ["h.0.x2"], [[0], [1]], "gpipe"),
    "two, eager 1f1b": ("gpt", ["h.0.x2"], [[0], [1]], "eager-1f1b"),
    "three, skips, eager 1f1b": ("skipping", ["h1", "h4"], [[0], [1], [2]], "eager-1f1b"),
    "two, inside attention": ("gpt", ["h.0.scores"], [[0], [1]], "1f1b"),
    "three, skips": ("skipping", ["h1", "h4"], [[0], [1], [2]], "1f1b"),
    "three, skips, zero-bubble": ("skipping", ["h1", "h4"], [[0], [1], [2]], "zb1p"),
    "two, zero-bubble": ("gpt", ["h.0.x2"], [[0], [1]], "zb1p"),
    "two, zero-bubble, convolutions": ("convolutional", ["h1"], [[0], [1]], "zb2p"),
    "interleaved": ("gpt", ["h.0.x1", "h.0.x2", "h.1.x1"], [[0], [1], [0], [1]], "interleaved"),
    "interleaved over three": ("skipping", ["h0", "h1", "h3", "h4", "h6"], [[0], [1], [2]] * 2, "interleaved"),
    "2:1": ("gpt", ["h.0.x2"], [[0, 1], [2]], "1f1b"),
    "1:2 in other order, inside attention": ("gpt", ["h.1.scores"], [[1], [2, 0]], "1f1b"),
    "2:1, zero-bubble": ("gpt", ["h.0.x2"], [[0, 1], [2]], "zb1p"),
    "four, one weight": ("one weight", ["t0", "t1", "t2"], [[0], [1], [2], [3]], "1f1b"),
    "interleaved, one weight": ("one weight", ["t0", "t1", "t2"], [[0], [1]] * 2, "interleaved"),
    "2:1:1, one weight": ("one weight", ["t0", "t1"], [[0, 1], [2], [3]], "1f1b"),
    "shared rank, one weight": ("one weight", ["t0", "t1"], [[0, 1], [1, 2], [3]], "1f1b"),
    "shared rank": ("gpt", ["h.0.x2"], [[0, 1], [1, 2]], "1f1b"),
    "shared rank, gpipe": ("skipping", ["h1", "h4"], [[0, 1, 2], [2], [0, 1]], "gpipe"),
    "explicit": ("gpt", ["h.0.x2"], [[0], [1]], [
        ["0F0", "0F1", "0F2", "0B1", "0I0", "0F3", "0W0", "0B2", "0B3"],
        ["1F1", "1F0", "1B1", "1I0", "1F2", "1B2", "1W0", "1F3", "1B3"],
    ]),
}  # fmt: skip
"""Name -> graph, tensors after which it is cut, ranks of the stages, kind of schedule or order."""
SHARES = {1: (6,), 2: (4, 2), 3: (3, 1, 2)}
"""Samples of a micro-batch by number of ranks."""


def lists_of(schedule, ranks, num_micro_batches):
    """Rank -> what it does."""
    pipeline = ranks.index(ranks[0], 1) if ranks[0] in ranks[1:] else len(ranks)
    if isinstance(schedule, str):
        program = arrange(KINDS[schedule], pipeline, len(ranks), num_micro_batches)
    else:
        program = read_order(schedule, pipeline, len(ranks), num_micro_batches)
    actions = [Action(*row) for row in program[:, [A_WORD, A_CHUNK, A_MICRO_BATCH]].tolist()]
    return {
        rank: [a for a in actions if rank in ranks[a.stage]] for rank in sorted({r for mine in ranks for r in mine})
    }


def run_case(name, rank, device):
    """Errors of the loss and of each gradient of this rank's stages, each over what it is compared with."""
    model, cuts, ranks, schedule = CASES[name]
    count = 6 if schedule == "interleaved" else 4
    graph, values, data, wanted = reference(model, count)
    held = {key: value.to(device) for key, value in values.items()}
    ends = [graph.producer[cut] + 1 for cut in cuts]
    spans = [range(a, b) for a, b in zip([0, *ends], [*ends, len(graph.operators)], strict=True)]
    groups = [dist.new_group(mine) if len(mine) > 1 else None for mine in ranks]
    parts = [
        PlainStage(graph, span, SHARES[len(mine)], count, mine.index(rank) if rank in mine else 0, group,
                   held if rank in mine else None)
        for span, mine, group in zip(spans, ranks, groups, strict=True)
    ]  # fmt: skip
    stages = [
        StageBorder(ranks=tuple(mine), inputs=part.inputs, outputs=part.outputs, parameters=part.layouts)
        for mine, part in zip(ranks, parts, strict=True)
    ]
    mine = {number: part for number, part in enumerate(parts) if rank in ranks[number]}
    order = global_order(lists_of(schedule, ranks, count), stages)
    pipeline = Pipeline(stages, mine, order, rank, device)
    for _ in range(2):
        for part in mine.values():
            for parameter in part.parameters.values():
                parameter.grad = None
        loss = pipeline.step(lambda name, box, m: data[m][name][tuple(slice(*span) for span in box)].to(device))
    own = {}
    for part in mine.values():
        own.update({key: parameter.grad.cpu() for key, parameter in part.parameters.items()})
    return worst(loss, own, *wanted)


@functools.cache
def reference(model, count):
    """Graph, values, micro-batches, and what one process makes of them."""
    graph = GRAPHS[model]()
    values, data = random_values(graph), random_data(graph, 6, count, VOCAB)
    return graph, values, data, one_process(graph, values, data, 6)


def worst(loss, own, wanted, gradients):
    """Differences from one process: of the loss over the loss, of gradients over their largest element.

    Gradients that are zero but for rounding are held against 1e-3 of the largest of all.
    """
    found = {} if loss is None else {"loss": abs(loss - wanted) / abs(wanted)}
    largest = max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in own.items():
        if name in gradients:
            scale = max(float(gradients[name].abs().max()), 1e-3 * largest)
            found[name] = float((gradient - gradients[name]).abs().max()) / scale
    return found


def one_process(graph, values, data, samples, tokens=1):
    """Mean loss of a token of the step and its gradients, each micro-batch computed as a whole."""
    leaves = {t.name: values[t.name].detach().clone().requires_grad_() for t in graph.parameters}
    total = 0.0
    for tensors in data:
        made = interpreter.run(graph, {**values, **leaves, **tensors}, samples)
        loss = made[graph.outputs[-1]] / (samples * tokens * len(data))
        loss.backward()
        total += float(loss.detach())
    return total, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def run(case, groups, device):
    """The work for `runtime_ranks.run_ranks`: for the name of a pipeline its errors, for a plan its outcome."""
    if isinstance(case, str):
        return run_case(case, dist.get_rank(), device)
    return runtime_ranks.run_case(case, groups, device)
