"""Which parameters of a network its exported graph reads, and which are frozen.

A plan is made for what the graph holds. A head whose output was left out, or a tower that the example inputs do not
reach, would be trained all the same: the file says so. The names of frozen parameters go into the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
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
    named_modules = _largest({name: numbers[name] for name in missing}, read)
    total = sum(numbers[name] for name in missing)
    return (
        f"{total:,} of {sum(numbers.values()):,} parameters are not in the graph, because no output needs them with "
        f"the example inputs: {named_modules}. If they are trained, export with inputs that reach them."
    )


def frozen(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters that need no gradient; none where no parameter needs one, as of a module for inference.

    A parameter with several names is named by each of them, for it is in the file under one.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    if not any(parameter.requires_grad for parameter in named.values()):
        return ()
    return tuple(
        name for name, parameter in named.items() if parameter.is_floating_point() and not parameter.requires_grad
    )


def _largest(numbers: Mapping[str, int], others: Collection[str]) -> str:
    """The outermost modules that hold some parameters and none of the others, largest first, with their numbers.

    Args:
        numbers: elements of each of these parameters.
        others: names of the other parameters.
    """
    paths = {".".join(name.split(".")[:stop]) for name in others for stop in range(1, name.count(".") + 1)}
    modules = Counter[str]()
    for name, count in numbers.items():
        modules[_outermost(name, paths)] += count
    largest = [f"{path} ({count:,})" for path, count in modules.most_common(_NAMED)]
    rest = f" and {len(modules) - _NAMED} more" if len(modules) > _NAMED else ""
    return f"{', '.join(largest)}{rest}"


def _outermost(name: str, taken: Collection[str]) -> str:
    """The outermost module of a parameter that is not among those taken; the parameter itself where there is none."""
    parts = name.split(".")
    for stop in range(1, len(parts)):
        path = ".".join(parts[:stop])
        if path not in taken:
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
            pending.extend(_operands(node))
    return frozenset(found)


def _operands(node: Any) -> Iterator[Any]:
    """What a node reads, also in the bodies of its loops and branches."""
    yield from node.inputs
    for attribute in node.attributes.values():
        for body in [attribute.value] if attribute.type.name == "GRAPH" else ():
            yield from body.outputs
            for inner in body:
                yield from _operands(inner)
