"""Cuts an nn.Module into the stages of a plan, for the loaders beside this file. It needs torch alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout, type(...))
"""Classes of the values that the program of a stage may hold."""


class Recorder(TorchFunctionMode):
    """Records what the code of a model does with tensors, as a graph whose nodes call modules and functions of torch.

    The model runs once on tensors without data, so code may ask for shapes, and not for values. Modules inside of
    which no stage begins are called as they are; of the others the code is recorded.
    """

    def __init__(self, model: nn.Module, is_called: Callable[[str], bool]) -> None:
        super().__init__()
        self.model, self.is_called, self.graph = model, is_called, fx.Graph()
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.is_inside = False
        # With the tensors themselves, so that no id is given twice.
        self.nodes: dict[int, tuple[Tensor, fx.Node]] = {}
        self.weights: dict[int, str] = {}

    def run(self, inputs: Sequence[Mapping[str, Any]], device: torch.device) -> Any:
        """The results of the model for inputs with the given name, shape and dtype, as tensors without data."""
        with FakeTensorMode(allow_non_fake_inputs=True):
            given = [torch.zeros(x["shape"], dtype=getattr(torch, x["dtype"]), device=device) for x in inputs]
            twins: dict[int, Tensor] = {}
            state = dict[str, Tensor]()
            of_model = (self.model.named_parameters, self.model.named_buffers)
            for name, x in (named for some in of_model for named in some(remove_duplicate=False)):
                blank = torch.zeros(x.shape, dtype=x.dtype, device=device)
                state[name] = twins.setdefault(id(x), blank.requires_grad_(x.requires_grad))
                self.weights.setdefault(id(state[name]), name)
            for number, x in enumerate(given):
                self.note(self.graph.placeholder(f"input_{number}"), x)
            names = [x["name"] for x in inputs]
            is_named = set(names) <= set(inspect.signature(self.model.forward).parameters)
            args, kwargs = ((), dict(zip(names, given, strict=True))) if is_named else (tuple(given), {})
            call = nn.Module.__call__
            with mock.patch.object(nn.Module, "__call__", lambda *a, **k: self.call(call, *a, **k)), self:
                return torch.func.functional_call(self.model, state, args, kwargs)

    def call(self, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Calls a module, and records the call if its code is not recorded."""
        path = self.paths.get(id(module), "")
        if self.is_inside or not self.is_called(path):
            return call(module, *args, **kwargs)
        given = self.node_of(args, path), self.node_of(kwargs, path)
        self.is_inside = True
        try:
            result = call(module, *args, **kwargs)
        finally:
            self.is_inside = False
        self.note(self.graph.call_module(path, *given), result)
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch, and records it if it returns tensors."""
        kwargs = kwargs or {}
        if self.is_inside:
            return func(*args, **kwargs)
        given, name = tree_flatten((args, kwargs))[0], getattr(func, "__name__", "?")
        result = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) for leaf in tree_flatten(result)[0]):
            if name == "__get__":
                node = self.graph.call_function(getattr, (self.node_of(args[0], name), func.__self__.__name__))
            else:
                node = self.graph.call_function(function(func), self.node_of(args, name), self.node_of(kwargs, name))
            if not torch.is_grad_enabled() and isinstance(result, Tensor):
                node = self.graph.call_method("detach", (node,))
            self.note(node, result)
        elif result is None and any(isinstance(leaf, Tensor) for leaf in given):
            raise ValueError(f"{name} changes a tensor in place")
        return result

    def note(self, node: fx.Node, result: Any) -> None:
        """Notes which node makes the tensors of a result."""
        for number, leaf in enumerate(tree_flatten(result)[0]):
            if isinstance(leaf, Tensor):
                made = node if leaf is result else self.graph.call_function(tensor_of, (node, number))
                self.nodes[id(leaf)] = leaf, made

    def node_of(self, given: Any, reader: str) -> Any:
        """Given values with nodes in place of tensors.

        Raises:
            ValueError: a value is neither a tensor that the recorded code knows nor a plain value.
        """
        if isinstance(given, (tuple, list)):
            found = [self.node_of(each, reader) for each in given]
            return found if isinstance(given, list) else tuple(found)
        if isinstance(given, dict):
            return {name: self.node_of(each, reader) for name, each in given.items()}
        if isinstance(given, slice):
            return slice(*(self.node_of(each, reader) for each in (given.start, given.stop, given.step)))
        if isinstance(given, Tensor) and id(given) in self.nodes:
            return self.nodes[id(given)][1]
        if isinstance(given, Tensor) and id(given) in self.weights:
            return self.graph.get_attr(self.weights[id(given)])
        if isinstance(given, Tensor):
            raise ValueError(f"{reader} takes a tensor that is no input, parameter or buffer of the model")
        if not isinstance(given, PLAIN):
            repair = "stages take tensors and numbers alone (of caches: model.config.use_cache = False)"
            raise ValueError(f"{reader} takes an object of {type(given).__name__}, and {repair}")
        return given


def function(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch under a name of this module: torch.fx finds no names for some of them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    call.__name__ = call.__qualname__ = getattr(func, "__name__", "call")
    return call


def tensor_of(result: Any, number: int) -> Any:
    """One of the tensors of a result."""
    return tree_flatten(result)[0][number]


def cut(
    model: nn.Module,
    paths: Sequence[Sequence[str]],
    inputs: Sequence[Mapping[str, Any]],
    device: torch.device,
    loss: Callable[[Any, Tensor], Tensor],
) -> tuple[list[nn.Module], Callable[[Any, Tensor], Tensor]]:
    """The stages of a model, by the modules of each, and the loss as a function of what the last stage returns.

    A stage takes the tensors that the stage before hands on, and every input of the model, as `input_0` and so on.
    What depends on no module of a stage, such as positions, is computed in each stage that needs it.

    Args:
        model: the model.
        paths: [stages] paths of modules.
        inputs: name, shape and dtype of each input of the model, for one micro-batch.
        device: the device that the stages run on.
        loss: the loss of the model's result and labels.

    Raises:
        ValueError: the code around the modules asks for the values of tensors, or hands on other things than tensors.
    """
    home = {path: number for number, inside in enumerate(paths) for path in inside}
    around = {path[:end] for path in home for end, letter in enumerate(path) if letter == "."} | {""}

    def owner(path: str) -> str:
        """The path in `paths` that a module has or is below; empty without one."""
        while path and path not in home:
            path = path.rpartition(".")[0]
        return path

    recorder = Recorder(model, lambda path: bool(owner(path)) or path not in around)
    try:
        result = recorder.run(inputs, device)
        leaves, structure = tree_flatten(result)
        made = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        ends = [recorder.node_of(leaves[number], "the result") for number in made]
    except Exception as fault:
        what = "the forward above the layers cannot be cut into stages"
        raise ValueError(f"{what}: {fault}. Change this code, or search with hints.fix.pp 1") from fault
    graph = recorder.graph
    graph.output(tuple(ends) if len(ends) > 1 else ends[0])
    place: dict[fx.Node, int] = {}  # of what depends on a module of a stage
    for node in graph.nodes:
        before = [place[n] for n in node.all_input_nodes if n in place]
        if node.op == "call_module" and owner(str(node.target)):
            before.append(home[owner(str(node.target))])
        if before:
            place[node] = max(before)
    bounds = [[n for n in place if place[n] < k and any(place[u] >= k for u in n.users)] for k in range(len(paths))]
    stages = [stage_of(graph, place, number, bounds) for number in range(len(paths))]

    def of_stage(outputs: Any, labels: Tensor) -> Tensor:
        """The loss, for which the tensors of the result are put into its structure again."""
        tensors = dict(zip(made, outputs if len(made) > 1 else [outputs], strict=True))
        whole = tree_unflatten([tensors.get(number, leaf) for number, leaf in enumerate(leaves)], structure)
        return loss(whole, labels)

    return [fx.GraphModule(model, stage) for stage in stages], of_stage


def handed_on(x: Tensor) -> Tensor:
    """A tensor that crosses between stages. It and its gradient are made contiguous: torch sends no other tensors."""
    found = x.contiguous()
    if found.requires_grad:
        found.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
    return found


def stage_of(graph: fx.Graph, place: dict[fx.Node, int], number: int, bounds: list[list[fx.Node]]) -> fx.Graph:
    """The program of one stage; `bounds` are the tensors that cross into each stage."""
    mine = {node for node, stage in place.items() if stage == number}
    for node in reversed(graph.nodes):
        mine |= {n for n in node.all_input_nodes if n not in place} if node in mine else set()
    found = fx.Graph()
    given = [found.placeholder(f"crossing_{count}") for count, _ in enumerate(bounds[number])]
    made = {n: found.call_function(handed_on, (some,)) for n, some in zip(bounds[number], given, strict=True)}
    for node in graph.nodes:
        if node.op == "placeholder" or (node in mine and node.op != "output"):
            made[node] = found.node_copy(node, made.__getitem__)
    if number + 1 == len(bounds):
        found.output(fx.map_arg(graph.output_node().args[0], made.__getitem__))
    else:
        ends = tuple(found.call_function(handed_on, (made[node],)) for node in bounds[number + 1])
        found.output(ends if len(ends) > 1 else ends[0])
    return found
