"""Which parameters of a network its exported graph reads, and what to say of the others.

A plan is made for what the graph holds. A head whose output was left out, or a tower that the example inputs do not
reach, would be trained all the same.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_NAMED = 3
"""Number of modules that are named."""


def every_name(module: nn.Module) -> frozenset[str]:
    """All names of the parameters of a network; tied ones have several."""
    return frozenset(name for name, _ in module.named_parameters(remove_duplicate=False))


def keep_outputs_with_parameters(model: Any, module: nn.Module) -> None:
    """Leaves out all outputs but the first and those that read further parameters (heads of their own).

    Args:
        model: the model as `onnx_ir` has it.
        module: the network that it was made of.
    """
    parameters = every_name(module)
    seen = _ancestors(model.graph.outputs[0], parameters)
    for output in list(model.graph.outputs)[1:]:
        mine = _ancestors(output, parameters)
        if mine <= seen:
            model.graph.outputs.remove(output)
        seen |= mine


def unread(model: Any, module: nn.Module) -> str:
    """A sentence about parameters that no output of a model reads; empty where there are none."""
    names = every_name(module)
    named = {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    read = frozenset().union(*(_ancestors(output, names) for output in model.graph.outputs))
    # A parameter with several names is in the file under one of them.
    held = {named[name] for name in read}
    numbers = {name: parameter.numel() for name, parameter in module.named_parameters()}
    missing = [name for name in numbers if named[name] not in held]
    if not missing:
        return ""
    modules = Counter[str]()
    for name in missing:
        modules[_outermost(name, read)] += numbers[name]
    largest = [f"{path} ({count:,})" for path, count in modules.most_common(_NAMED)]
    rest = f" and {len(modules) - _NAMED} more" if len(modules) > _NAMED else ""
    total = sum(numbers[name] for name in missing)
    return (
        f"{total:,} of {sum(numbers.values()):,} parameters are not in the graph, because no output needs them with "
        f"the example inputs: {', '.join(largest)}{rest}. If they are trained, export with inputs that reach them."
    )


def _outermost(name: str, read: frozenset[str]) -> str:
    """The outermost module of a parameter of which nothing is read; the parameter itself where there is none."""
    parts = name.split(".")
    for stop in range(1, len(parts)):
        path = ".".join(parts[:stop])
        if not any(other.startswith(f"{path}.") for other in read):
            return path
    return name


def _ancestors(value: Any, parameters: frozenset[str]) -> frozenset[str]:
    """Names of the parameters that a value is computed from."""
    found, pending, seen = set[str](), [value], set[int]()
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if one.name in parameters:
            found.add(one.name)
        node = one.producer()
        if node is not None:
            pending.extend(node.inputs)
    return frozenset(found)
