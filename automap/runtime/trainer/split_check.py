"""Checks that a network computes the same when its layers are split, and the changes that its code may need for it."""

from __future__ import annotations

import contextlib
import fnmatch
import math
import re
from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automap.errors import PlanError
from automap.runtime.export_faults import innermost
from automap.runtime.mesh_groups import Axis
from automap.runtime.operators.base import torch_dtype
from automap.runtime.trainer.roles import Roles
from automap.runtime.trainer.training_graph import input_names, scores_of
from ir.graph import Graph
from ir.loss import class_dim_of

Split = tuple[Roles, Axis]
"""The roles of modules, and the sharding axis."""
SAME_ON_RANKS = re.compile("head_(dim|size)$|groups$|rotary")
"""Names of sizes that are the same on a rank: of a single head, or of its rotated part, and heads that share keys."""
SIZES_OF_RANKS = (
    "Where a layer is split, write the number of heads as -1 and their size as a number, or name such numbers in"
    " per_rank, and read the length of a sequence from what a layer makes (q.shape[1] of q = self.query(x), not"
    " x.shape[1]): a block may get a part of it."
)
"""What code does that runs on the part of a rank."""
PROBE_ULPS = 200
"""The number of rounding errors by which a split network may differ from the whole one (assumed)."""


def probe_inputs(graph: Graph, module: nn.Module, samples: int) -> list[Tensor]:
    """Random data of the shapes and types of the graph's inputs, without the labels."""
    rows = min((m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)), default=2)
    like = next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    found = []
    for tensor in graph.data_inputs:
        shape = tensor.shape_at(samples)
        if tensor.is_float:
            found.append(torch.randn(shape, generator=generator).to(like))
        else:
            found.append(torch.randint(rows, shape, generator=generator).to(like.device, torch_dtype(tensor.dtype)))
    return found


def computes(module: nn.Module, inputs: list[Tensor], names: tuple[str, ...]) -> Tensor:
    """The scores of a network for some inputs, without dropout or gradients; see `scores_of`.

    Raises:
        PlanError: the network does not take these inputs.
    """
    with torch.no_grad():
        return _evaluated(module, inputs, names)


def _evaluated(module: nn.Module, inputs: list[Tensor], names: tuple[str, ...]) -> Tensor:
    """The scores of a network without dropout."""
    with evaluating(module):
        return runs(module, inputs, names)


def runs(module: nn.Module, inputs: list[Tensor], names: tuple[str, ...]) -> Tensor:
    """The scores of a network as it is, in training or not; see `scores_of`.

    Raises:
        PlanError: the network does not take these inputs.
    """
    try:
        return scores_of(module, inputs, names)
    except (TypeError, ValueError, RuntimeError, IndexError) as fault:
        path, line = innermost(module, [fault])
        where = f" in {path or 'its own forward'}{line}" if line else ""
        raise PlanError(
            f"does not run on the inputs of the plan's model{where}: {str(fault).splitlines()[0]}",
            field="module", value=[tuple(x.shape) for x in inputs],
            repair=f"Its forward takes those inputs in this order. {SIZES_OF_RANKS}",
        ) from fault  # fmt: skip


def trained_ones(module: nn.Module, graph: Graph, names: Collection[str]) -> set[str]:
    """Those of some parameters of a network that get a gradient from its scores.

    Raises:
        PlanError: the network does not take the inputs of the graph.
    """
    every = dict(module.named_parameters())
    before = {name: parameter.requires_grad for name, parameter in every.items()}
    try:
        for name, parameter in every.items():
            parameter.requires_grad_(name in names)
        scores = _evaluated(module, probe_inputs(graph, module, 1), input_names(graph, module))
        if not scores.requires_grad:
            return set()
        asked = sorted(names)
        found = torch.autograd.grad(scores.sum(), [every[name] for name in asked], allow_unused=True)
        return {name for name, gradient in zip(asked, found, strict=True) if gradient is not None}
    finally:
        for name, parameter in every.items():
            parameter.requires_grad_(before[name])


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """A context in which a network is in evaluation mode; afterwards each module is as it was.

    torch's encoder layers call the modules inside of them, as in training. By themselves they would compute these in
    one kernel, and what a plan does around a module would not happen.
    """
    before = {child: child.training for child in module.modules()}
    is_fused = torch.backends.mha.get_fastpath_enabled()
    module.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fused)
        for child, training in before.items():
            child.training = training


def check_same(module: nn.Module, inputs: list[Tensor], names: tuple[str, ...], wanted: Tensor, split: Split) -> None:
    """Refuses a network whose own code, run on split layers, computes something else.

    Args:
        module: the network, whose layers are split.
        inputs: what the whole network made `wanted` of.
        names: see `scores_of`.
        wanted: the scores of the whole network.
        split: how it is split.

    Raises:
        PlanError: it does not run, or its output differs by more than rounding.
    """
    roles, axis = split
    found = computes(module, inputs, names)
    if roles.splits_classes:
        wanted = wanted.chunk(axis.size, class_dim_of(wanted.ndim))[axis.index]
    # Code of norms often computes in float32, whatever it is given.
    eps = max(torch.finfo(wanted.dtype).eps, torch.finfo(torch.float32).eps)
    limit = PROBE_ULPS * eps * float(wanted.abs().max())
    error = float((found - wanted).abs().max()) if found.shape == wanted.shape else math.inf
    # A NaN is not agreement either. All ranks learn the result, so that none goes on alone.
    wrong = torch.tensor(float(not error <= limit), device=wanted.device)
    dist.all_reduce(wrong)
    if wrong:
        raise PlanError(
            "computes something else on split layers than whole", field="module",
            value=f"{error:.1e} where {limit:.1e} is rounding",
            repair=SIZES_OF_RANKS,
        )  # fmt: skip


def sizes_of_ranks(module: nn.Module, roles: Roles) -> list[str]:
    """The attributes of modules that hold the size of a dim that is split in their code, such as `h.0.attn.num_heads`.

    A number may be that of such a dim by chance: `SAME_ON_RANKS` has names of those that no rank divides.
    """
    return [
        f"{path}.{name}"
        for path, child in module.named_modules()
        if path in roles.sizes
        for name, value in vars(child).items()
        if type(value) is int and value in roles.sizes[path] and not SAME_ON_RANKS.search(name)
    ]


def divide_sizes(module: nn.Module, attributes: Sequence[str], size: int) -> None:
    """Divides sizes that modules hold as attributes.

    Args:
        attributes: globs of paths of modules, each with the name of an attribute.
        size: the size of the sharding axis.

    Raises:
        PlanError: a glob matches no module, or the axis does not divide a size.
    """
    for glob in attributes if size > 1 else ():
        pattern, _, attribute = glob.rpartition(".")
        found = [child for path, child in module.named_modules() if fnmatch.fnmatchcase(path, pattern)]
        for child in found:
            value = getattr(child, attribute, None)
            if not isinstance(value, int) or value % size:
                raise PlanError(
                    f"is not a number that {size} ranks divide", field=f"per_rank.{glob}", value=value,
                    repair="Name attributes that hold numbers of heads or of features.",
                )  # fmt: skip
            setattr(child, attribute, value // size)
        if not found:
            raise PlanError("names no module", field="per_rank", value=glob, repair="Write it as h.*.attn.num_heads.")
