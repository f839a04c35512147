"""Complex numbers of an exported program written as pairs of real ones, which ONNX can hold.

The rotary embeddings of DeepSeek-V2 and Llama 4 turn pairs of features by products of complex numbers. A complex tensor
`[...]` becomes a real one `[..., 2]` of its real and imaginary parts. Complex tensors from
operators that are not known here stay as they are, and the exporter reports them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph, Node


def with_real_numbers(exported: ExportedProgram) -> ExportedProgram:
    """The program, changed in place: its complex tensors are pairs of real ones."""
    if any(_is_complex(node) for node in exported.graph.nodes):
        _Pairs(exported.graph).write()
        exported.graph_module.recompile()
    return exported


def _is_complex(node: Node) -> bool:
    import torch

    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


class _Pairs:
    """One graph; `pairs` holds the pair of each complex tensor that is written as one."""

    def __init__(self, graph: Graph) -> None:
        import torch

        aten = torch.ops.aten
        self.aten: Any = aten
        self.graph = graph
        self.pairs: dict[Node, Node] = {}
        self.like: Node
        """The operator that is written at present."""
        self.rules: dict[Any, Callable[[Any], Node]] = {
            aten.view_as_complex.default: lambda node: node.args[0],
            aten.view_as_real.default: lambda node: self.pairs[node.args[0]],
            aten.polar.default: lambda node: self._polar(*node.args),
            aten.mul.Tensor: lambda node: self._product(*node.args),
            aten.unsqueeze.default: lambda node: self._unsqueezed(*node.args),
            # Types and places of complex tensors say nothing of their pairs.
            aten.to.dtype_layout: lambda node: self.pairs[node.args[0]],
        }

    def write(self) -> None:
        """Writes what can be written, and removes what nothing reads then."""
        for node in list(self.graph.nodes):
            given = [other for other in node.all_input_nodes if _is_complex(other)]
            known = node.target in self.rules and all(other in self.pairs for other in given)
            if known and (given or _is_complex(node)):
                self.like = node
                with self.graph.inserting_before(node):
                    pair = self.rules[node.target](node)
                if _is_complex(node):
                    self.pairs[node] = pair
                else:
                    node.replace_all_uses_with(pair)
        readers = (self.aten._assert_tensor_metadata.default, self.aten.view_as_real.default)
        for node in reversed(list(self.graph.nodes)):
            is_written = node in self.pairs or (node.target in readers and node.args[0] in self.pairs)
            if is_written and not node.users:
                self.graph.erase_node(node)
        self.graph.lint()

    def _add(self, target: Any, *args: Any) -> Node:
        """A further operator, of the same module as the one that is written; its value is computed on fake tensors."""
        node = self.graph.call_function(target, args)
        node.meta = {**self.like.meta, "val": None}
        values = [_value(argument) for argument in args]
        with self.like.meta["val"].fake_mode:
            node.meta["val"] = target(*values)
        return node

    def _parts(self, pair: Node) -> list[Node]:
        return [self._add(self.aten.select.int, pair, -1, part) for part in (0, 1)]

    def _paired(self, real: Node, imaginary: Node) -> Node:
        return self._add(self.aten.stack.default, [real, imaginary], -1)

    def _polar(self, size: Node, angle: Node) -> Node:
        mul = self.aten.mul.Tensor
        turned = (self._add(function, angle) for function in (self.aten.cos.default, self.aten.sin.default))
        return self._paired(*(self._add(mul, size, part) for part in turned))

    def _product(self, one: Any, other: Any) -> Node:
        mul = self.aten.mul.Tensor
        if one not in self.pairs:
            one, other = other, one
        if other in self.pairs:
            (a, b), (c, d) = self._parts(self.pairs[one]), self._parts(self.pairs[other])
            real = self._add(self.aten.sub.Tensor, self._add(mul, a, c), self._add(mul, b, d))
            return self._paired(real, self._add(self.aten.add.Tensor, self._add(mul, a, d), self._add(mul, b, c)))
        scale = self._add(self.aten.unsqueeze.default, other, -1) if hasattr(other, "meta") else other
        return self._add(mul, self.pairs[one], scale)

    def _unsqueezed(self, whole: Node, dim: int) -> Node:
        return self._add(self.aten.unsqueeze.default, self.pairs[whole], dim if dim >= 0 else dim - 1)


def _value(argument: Any) -> Any:
    if isinstance(argument, list):
        return [_value(one) for one in argument]
    return argument.meta["val"] if hasattr(argument, "meta") else argument
