"""A network cut into pipeline stages between its modules, by tracing its outermost forward.

Modules that belong to one stage are not traced into. Each stage gets the part of the traced program that its output
needs, back to the one tensor that crosses from the stage before. Tensors that depend on no parameter (positions, masks)
are computed in every stage that uses them, from the model's inputs. Modules keep their paths, and parameters their
names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.fx
from torch import Tensor, nn

from automap.runtime.trainer.random_numbers import Watching, can_draw
from automap.runtime.trainer.roles import Roles
from automap.runtime.trainer.supported_plans import INSTEAD, FinerThanModules, refuse
from automap.runtime.trainer.training_graph import input_names
from ir.graph import Graph

CROSSING = "crossing"
"""The name of a stage's argument that the stage before makes."""


class _HandedOn(torch.autograd.Function):
    """An identity that makes the gradient contiguous, as messages between processes must be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def handed_on(x: Tensor) -> Tensor:
    """A tensor that the stage before made, which gets its gradient back."""
    found: Tensor = _HandedOn.apply(x)  # type: ignore[no-untyped-call]
    return found


def sent_on(x: Tensor) -> Tensor:
    """A tensor that goes to the next stage: contiguous, as messages must be, and no view.

    A backward pass that is taken apart (zero-bubble schedules) detaches it in place, which torch refuses for views.
    """
    whole = x.contiguous()
    return whole.clone() if whole._is_view() else whole


class _Tracer(torch.fx.Tracer):
    """Traces what a forward computes of the model's inputs; its other arguments have their defaults."""

    def __init__(self, roles: Roles, inputs: Sequence[str]) -> None:
        super().__init__()
        self.roles, self.inputs = roles, inputs

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        span = span_of(self.roles, module_qualified_name)
        return span is None or span[0] == span[1]

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """The arguments with which torch traces a forward. Arguments that are no inputs of the model get their
        defaults: torch would trace a placeholder in place of the default."""
        parameters = inspect.signature(root_fn).parameters
        traced, given = super().create_args_for_root(root_fn, is_module, concrete_args)
        for place, value in enumerate(given):
            name = str(value.node.target) if isinstance(value, torch.fx.Proxy) else ""
            if name and name not in self.inputs:
                self.graph.erase_node(value.node)
                given[place] = {} if name.startswith("**") else () if name[0] == "*" else parameters[name].default
        return traced, given


class Untraced(Exception):
    """The forward of a network cannot be traced."""


def span_of(roles: Roles, path: str) -> tuple[int, int] | None:
    """The first and the last stage of the operators of a module; None where the graph has none of it."""
    inside = [scope for scope in roles.stages if scope == path or scope.startswith(f"{path}.")]
    if not inside:
        return None
    return min(roles.stages[s] for s in inside), max(roles.ends[s] for s in inside)


def arguments(graph: Graph, module: nn.Module) -> tuple[str, ...]:
    """The arguments of a network's `forward` that are the inputs of its graph, in their order.

    Raises:
        FinerThanModules: `forward` has no names for them, by which stages could take them.
    """
    inputs, parameters = graph.data_inputs, inspect.signature(module.forward).parameters
    found = input_names(graph, module) or tuple(parameters)[: len(inputs)]
    if len(found) < len(inputs) or any(parameters[name].kind is inspect.Parameter.VAR_POSITIONAL for name in found):
        raise refuse_cut(
            f"forward{inspect.signature(module.forward)} does not name each of its inputs",
            f"Give it an argument for each: {', '.join(tensor.name for tensor in inputs)}.",
        )
    return found


def cut(module: nn.Module, roles: Roles, num_stages: int, inputs: Sequence[str]) -> list[nn.Module]:
    """The stages of a network, which share its submodules.

    Every stage takes all inputs of the model by name; each but the first takes the crossing tensor before them.

    Args:
        module: the network.
        roles: the stages of its operators by scope.
        num_stages: the number of stages.
        inputs: the arguments of `forward` that are the model's inputs; the others have their defaults.

    Raises:
        Untraced: the forward cannot be traced.
        FinerThanModules: it cannot be cut where the plan says.
    """
    watching = Watching(next(module.parameters()).device, [""])
    try:
        with watching:
            traced = _Tracer(roles, inputs).trace(module)
    except Exception as fault:
        raise Untraced(str(fault).split("\n")[0]) from fault
    for draw in watching.draws.get("", ()):
        raise refuse_cut(f"a trace keeps the numbers of {draw.what} for all steps", "Put it into a module of its own.")
    scores = _scores_alone(traced)
    stage_of = _place(traced, module, roles)
    last = num_stages - 1
    # Behind the scores there may be stages for the loss alone.
    behind = max(stage_of.values(), default=0)
    ends = [*(_crossing(traced, stage_of, number) if number < behind else scores for number in range(last)), scores]
    return [
        _stage(module, traced, None if number == 0 else ends[number - 1], ends[number], stage_of, number)
        for number in range(num_stages)
    ]


def _scores_alone(traced: torch.fx.Graph) -> torch.fx.Node:
    """What `training_graph.scores_of` takes of what a network returns; what makes the rest alone is left out.

    Raises:
        FinerThanModules: these are not scores.
    """
    output = next(n for n in traced.nodes if n.op == "output")
    found: Any = output.args[0]
    if isinstance(found, Mapping):
        found = found.get("logits")
    elif isinstance(found, tuple | list) and found:
        found = found[0]
    if not isinstance(found, torch.fx.Node):
        raise refuse_cut("the model returns no scores", "Return them alone, first in a tuple, or as `logits`.")
    beside = _behind(output) - {found} - _behind(found)
    output.args = (found,)
    for node in reversed(list(traced.nodes)):
        if node in beside and not node.users and node.op != "placeholder":
            traced.erase_node(node)
    return found


def _place(traced: torch.fx.Graph, module: nn.Module, roles: Roles) -> dict[torch.fx.Node, int]:
    """The stage of every node that depends on a parameter or draws random numbers.

    A parameter that is read in place of its module is refused: the stages would hold it apart from the network, whose
    parameters are what the optimizer and checkpoints see.
    """
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    read = {node for end in traced.nodes if end.op == "output" for node in _behind(end)}
    found: dict[torch.fx.Node, int] = {}
    for node in traced.nodes:
        stages = [found[n] for n in node.all_input_nodes if n in found]
        if node.op == "call_module":
            span = span_of(roles, str(node.target))
            child = module.get_submodule(str(node.target))
            if span is not None:
                stages.append(span[0])
            elif node in read and any(True for _ in child.parameters()):
                raise refuse_cut(f"{node.target} is not in the plan's model", "Give the model that was searched.")
        elif node.op == "get_attr" and str(node.target) in names:
            raise _read_apart(str(node.target), module)
        elif not stages and can_draw(node):
            # Stages that compute it each on their own would have other numbers.
            stages.append(0)
        if stages:
            found[node] = max(stages)
    return found


def _behind(end: torch.fx.Node) -> set[torch.fx.Node]:
    """All nodes that a node depends on."""
    found: set[torch.fx.Node] = set()
    waiting = list(end.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _read_apart(name: str, module: nn.Module) -> FinerThanModules:
    """The error for a parameter that code which is cut reads itself."""
    owner, _, last = name.rpartition(".")
    if owner and not any(True for _ in module.get_submodule(owner).children()):
        text = f"several stages run {owner}, or code between modules reads its {last}"
        return refuse_cut(text, "Use a plan without a pipeline.")
    return refuse_cut(f"the parameter {name} belongs to no module of one stage", "Put it into a module of its own.")


def _crossing(traced: torch.fx.Graph, stage_of: dict[torch.fx.Node, int], number: int) -> torch.fx.Node:
    """The one node of the stages up to `number` that later stages read."""
    found: list[torch.fx.Node] = [
        node
        for node in traced.nodes
        if stage_of.get(node, number + 1) <= number and any(stage_of.get(u, -1) > number for u in node.users)
    ]
    if len(found) != 1:
        names = [node.name for node in found]
        raise refuse_cut(f"{len(found)} tensors cross after stage {number}: {names}", "Cut between blocks.")
    return found[0]


def _stage(
    module: nn.Module,
    traced: torch.fx.Graph,
    begin: torch.fx.Node | None,
    end: torch.fx.Node,
    stage_of: dict[torch.fx.Node, int],
    number: int,
) -> nn.Module:
    """The module of one stage: what its end needs, back to its begin.

    Args:
        module: the whole network.
        begin: the node that crosses from the stage before; None for the first stage.
        end: the node that the stage makes.
        stage_of: the stage of every node that depends on a parameter.
    """
    needed: set[torch.fx.Node] = set()
    waiting = [end]
    while waiting:
        node = waiting.pop()
        if node in needed or node is begin:
            continue
        if stage_of.get(node, number) != number:
            raise refuse_cut(f"{node.name} of stage {stage_of[node]} runs in stage {number}", "Cut between blocks.")
        needed.add(node)
        waiting += node.all_input_nodes
    graph = torch.fx.Graph()
    made: dict[torch.fx.Node, torch.fx.Node] = {}
    if begin is not None:
        made[begin] = graph.call_function(handed_on, (graph.placeholder(CROSSING),))
    for node in traced.nodes:
        # Every stage takes all inputs of the model, used or not.
        if node is not begin and (node in needed or node.op == "placeholder"):
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(graph.call_function(sent_on, (made[end],)))
    return torch.fx.GraphModule(module, graph)


def prune(module: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Removes from a network the modules that no kept stage has; the others keep their names."""
    kept = {id(child) for stage in stages for child in stage.modules()}
    for name, child in list(module.named_children()):
        if id(child) not in kept:
            if any(id(inner) in kept for inner in child.modules()):
                prune(child, stages)
            else:
                delattr(module, name)


def refuse_cut(message: str, repair: str) -> FinerThanModules:
    """The error for a network that cannot be cut where the plan says."""
    return refuse("stages", "modules", f"cannot be cut there: {message}", f"{repair} {INSTEAD}")
