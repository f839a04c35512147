"""Borders: the modules in front of which a tensor changes its placement.

A module may need a tensor in another placement than the one in which it was made: attention reads the whole sequence,
where norms have made only a part of it on each rank. The change is made once, in front of the largest module in which
all operators that read the tensor need the same placement. So the code of this module only sees the new placement, and
queries, keys and values share one collective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from automap.runtime.tensor_layout import TensorLayouts
from automap.runtime.trainer.module_tree import is_called, unit_paths
from automap.runtime.trainer.roles import Border, Move
from automap.runtime.trainer.sharded_modules import moved
from ir.factors import Placement
from ir.graph import Operator


class Use(NamedTuple):
    """An operator that reads a tensor."""

    op: Operator
    wanted: Placement
    """The placement in which it reads the tensor."""
    gradient: Placement
    """The placement in which it makes the gradient of the tensor."""


def called_modules(module: nn.Module) -> frozenset[str]:
    """The modules that may have a border: those that are called, and hold no repeated blocks."""
    units = unit_paths(module)
    return frozenset(
        path
        for path, child in module.named_modules()
        if path and is_called(child) and not any(unit.startswith(f"{path}.") for unit in units)
    )


def by_border(
    uses: Sequence[Use], maker: str, modules: Collection[str], depth: int = 1
) -> Iterator[tuple[str | None, list[Use]]]:
    """Groups the uses of a tensor by border: the largest module in which all of them are alike. None stands for uses in
    code that is in no such module.

    Args:
        uses: all uses of the tensor.
        maker: the scope in which it is made, which is in none of the modules.
        modules: the modules that may have a border.
        depth: of the modules around the uses.
    """
    inside: dict[str | None, list[Use]] = {}
    for use in uses:
        parts = use.op.scope.split(".") if use.op.scope else []
        inside.setdefault(".".join(parts[:depth]) if len(parts) >= depth else None, []).append(use)
    for path, some in inside.items():
        if path is None:
            yield None, some
        elif path in modules and not f"{maker}.".startswith(f"{path}.") and len({use[1:] for use in some}) == 1:
            yield path, some
        else:
            yield from by_border(some, maker, modules, depth + 1)


Returned = Mapping[str, Sequence[Tensor]]
"""Path of a module -> the tensors that it has returned."""


@contextmanager
def returned_by(module: nn.Module, paths: Collection[str]) -> Iterator[Returned]:
    """Collects the tensors that some modules inside of a network return while the block runs."""
    found: dict[str, list[Tensor]] = {path: [] for path in paths}

    def note(path: str, child: nn.Module, args: Any, output: Any) -> None:
        found[path] += [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]

    known = dict(module.named_modules(remove_duplicate=False))
    hooks = [known[path].register_forward_hook(partial(note, path)) for path in paths if path in known]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        found.clear()


def enter_by_borders(
    module: nn.Module, borders: Sequence[Border], layouts: TensorLayouts, returned: Returned = MappingProxyType({})
) -> None:
    """Makes a module change the placements of its arguments before its own code runs.

    Args:
        module: the module.
        borders: the changes of placement.
        layouts: the layouts on the sharding axis.
        returned: what the modules that make the tensors have returned so far, by which arguments are known.
    """
    module.forward = _Entered(module, borders, layouts, returned)


class _Entered:
    """A forward method whose arguments change their placement first.

    The argument of a border is found in the first pass, which has random data. It is what the module that makes the
    border's tensor has returned; otherwise, since code may change it on the way, the first argument with the shape of
    the tensor with which the code runs. In all later passes it is the argument at the same position. A module that is
    called several times has one border for each call, all alike.
    """

    def __init__(
        self, module: nn.Module, borders: Sequence[Border], layouts: TensorLayouts, returned: Returned
    ) -> None:
        self._forward: Callable[..., Any] = module.forward
        self._module, self._borders, self._layouts, self._returned = module, borders, layouts, returned
        self._moves: dict[int, Move] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        if self._moves:
            return self._run(leaves, structure, self._moves)
        first: RuntimeError | ValueError | None = None
        for moves in self._placements(leaves, self._borders, {}):
            try:
                found = self._run(leaves, structure, moves)
            except (RuntimeError, ValueError) as fault:
                # A split tensor of the same shape may be another argument. All ranks fail alike, by its shape, in torch
                # or at a border of a module inside.
                first = first or fault
                self._forget()
            else:
                self._moves = moves
                return found
        assert first is not None
        raise first

    def _forget(self) -> None:
        """Forgets the arguments that borders inside of the module found with tensors that were split wrongly."""
        for child in self._module.modules():
            forward = vars(child).get("forward")
            if isinstance(forward, _Entered):
                forward._moves = {}

    def _run(self, leaves: Sequence[Any], structure: TreeSpec, moves: Mapping[int, Move]) -> Any:
        """Runs the code after the arguments at some positions have changed their placement."""
        leaves = list(leaves)
        for place, move in moves.items():
            given, made = leaves[place], moved(leaves[place], move, self._layouts)
            # Attention may get one tensor as queries and as keys.
            for other, leaf in enumerate(leaves):
                if leaf is given and (other == place or other not in moves):
                    leaves[other] = made
        args, kwargs = tree_unflatten(leaves, structure)
        return self._forward(*args, **kwargs)

    def _placements(
        self, leaves: Sequence[Any], left: Sequence[Border], found: dict[int, Move]
    ) -> Iterator[dict[int, Move]]:
        """Yields the positions that the arguments of all borders may have, each with its change of placement; those of
        the first arguments come first.

        Args:
            leaves: the arguments.
            left: the borders that have no position yet.
            found: the positions of the others.
        """
        if not left:
            yield found
            return
        border, seen = left[0], self._borders[: len(self._borders) - len(left)]
        fits = list(self._places(border, leaves, found))
        others = [other for other in self._borders if other.maker != border.maker]
        places = [place for place in fits if self._is_made(leaves[place], border)] or [
            place for place in fits if not any(self._is_made(leaves[place], other) for other in others)
        ]
        if not places and not any(replace(other, name=border.name) == border for other in seen):
            raise ValueError(f"no argument has the shape {border.shape} of {border.name}")
        for place in places:
            yield from self._placements(leaves, left[1:], {**found, place: border.move})
        if not places:
            yield from self._placements(leaves, left[1:], found)

    def _is_made(self, leaf: Tensor, border: Border) -> bool:
        """Whether the module that makes the tensor of a border has returned an argument."""
        return any(
            leaf is made or (leaf.data_ptr() == made.data_ptr() and leaf.shape == made.shape)
            for made in self._returned.get(border.maker, ())
        )

    def _places(self, border: Border, leaves: Sequence[Any], taken: Collection[int]) -> Iterator[int]:
        """Yields the positions of the arguments that fit a border and that no border before it has taken."""
        shape = list(border.shape)
        if border.move.given >= 0:
            shape[border.move.given] //= self._layouts.mesh.axes[0].size
        for place, leaf in enumerate(leaves):
            if place not in taken and isinstance(leaf, Tensor) and leaf.ndim == len(shape):
                dims = zip(leaf.shape, shape, strict=True)
                if all(size == wanted for i, (size, wanted) in enumerate(dims) if i != border.batch_dim):
                    yield place
