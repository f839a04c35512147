"""Checkpoints of a graph that is trained in place of its modules, in the form of `checkpoint.Checkpoint`.

Weights and moments are written whole, under the names of the user's module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from automap.errors import UserError
from automap.runtime.executor.optimizer import Masters
from automap.runtime.executor.stage_executor import StageExecutor
from automap.runtime.operators.apply import value_of
from automap.runtime.trainer.checkpoint import check_names, prepare_state, read, states_of, take_numbers, write
from ir.graph import Graph


class GraphCheckpoint:
    """The weights, buffers and optimizer state of the stages of this rank, by their names in files."""

    def __init__(
        self, graph: Graph, ties: Mapping[str, str], executors: Mapping[int, StageExecutor], masters: Masters,
        buffers: Mapping[str, Tensor], every: Collection[str],
    ) -> None:  # fmt: skip
        """Takes stages that are ready to run.

        Args:
            graph: the graph of the network.
            ties: the names of shared parameters -> the first name of each.
            executors: the stages of this rank, by number.
            masters: what the optimizer updates, in the order of the stages and of their leaves.
            buffers: persistent buffers of the network, which no step changes.
            every: the names of all parameters and buffers of the network.
        """
        self._graph, self._ties, self._executors, self._buffers = graph, ties, executors, buffers
        self._masters, self._every = masters, [name for name in every if name not in ties]

    def save(self, folder: Path, optimizer: torch.optim.Optimizer, more: Mapping[str, Any]) -> None:
        """Writes everything to a folder; a checkpoint that is there is replaced once the new one is complete."""
        write(folder, {**self._tensors(optimizer), "more": more})

    @torch.no_grad()
    def load(self, folder: Path, optimizer: torch.optim.Optimizer, more: Mapping[str, Any]) -> dict[str, Any]:
        """Reads what `save` wrote, or `checkpoint.Checkpoint.save`; returns `more` as it was saved.

        Raises:
            UserError: see `checkpoint.read`.
        """
        check_names(folder, self._every)
        names = {
            part: list(self._file_names(executor.members[leaf]))
            for executor, held in self._held()
            for leaf, part in held.items()
        }
        prepare_state(optimizer, folder, names)
        state = {**self._tensors(optimizer), "more": dict(more)}
        read(folder, state)
        for executor, held in self._held():
            self._take(executor, held, state, "model.", "")
            for key, moments in self._states(optimizer, held).items():
                shaped = _shaped(moments, held)
                self._take(executor, shaped, state, "optimizer.", f".{key}")
                for leaf in moments.keys() - shaped.keys():
                    name = next(self._file_names(executor.members[leaf]))
                    moments[leaf].copy_(state[f"optimizer.{name}.{key}"])
            for leaf, part in held.items():
                take_numbers(optimizer, part, "optimizer." + next(self._file_names(executor.members[leaf])), state)
        found: dict[str, Any] = state["more"]
        return found

    @torch.no_grad()
    def begin_with(self, values: Mapping[str, Tensor]) -> None:
        """Gives the optimizer the numbers of a network, of which leaves in a short format have rounded ones.

        Args:
            values: whole parameters by the name in files.
        """
        for executor, held in self._held():
            self._take(executor, held, values, "", "")

    def _held(self) -> Iterator[tuple[StageExecutor, dict[str, Tensor]]]:
        """The stages of this rank, each with what the optimizer updates of it, by leaf."""
        masters = iter(self._masters.masters)
        for executor in self._executors.values():
            yield executor, dict(zip(executor.parameters, masters, strict=False))

    @staticmethod
    def _states(optimizer: torch.optim.Optimizer, held: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """What an optimizer keeps: name -> leaf -> a tensor of its shape, or a number of steps."""
        found: dict[str, dict[str, Tensor]] = {}
        for leaf, part in held.items():
            for key, value in states_of(optimizer, part).items():
                if value.shape != part.shape and value.numel() > 1:
                    raise UserError(
                        "has other numbers than one for each of a weight's, and this process has a part of the weight",
                        field=f"optimizer.state.{key}", value=tuple(value.shape),
                        repair="Take an optimizer such as AdamW, or a plan that modules run: see trainer.why.",
                    )  # fmt: skip
                found.setdefault(key, {})[leaf] = value
        return found

    def _tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Every tensor of this rank, whole, by its name in files. A collective."""
        found: dict[str, Any] = {f"model.{name}": value for name, value in self._buffers.items()}
        for executor, held in self._held():
            found.update({f"model.{n}": t for n, t in self._in_file(executor.wholes(held)).items()})
            for key, moments in self._states(optimizer, held).items():
                shaped = _shaped(moments, held)
                whole = self._in_file(executor.wholes(shaped))
                for leaf in moments.keys() - shaped.keys():
                    whole |= dict.fromkeys(self._file_names(executor.members[leaf]), moments[leaf])
                found.update({f"optimizer.{name}.{key}": value for name, value in whole.items()})
        return found

    def _take(
        self, executor: StageExecutor, parts: Mapping[str, Tensor], state: Mapping[str, Any], head: str, tail: str
    ) -> None:
        """Copies this rank's parts of what was read, by leaf."""
        names = [name for leaf in parts for name in executor.members[leaf]]
        read = {name: state[f"{head}{name}{tail}"] for name in self._file_names(names)}
        read |= {alias: read[first] for alias, first in self._ties.items() if first in read}
        for leaf, part in executor.own({name: value_of(self._graph, name, read) for name in names}).items():
            parts[leaf].copy_(part)

    def _file_names(self, names: Iterable[str]) -> Iterator[str]:
        """The names in files of parameters of the graph, each once."""
        found: dict[str, None] = {}
        for name in names:
            parts = [part for part, (source, *_) in self._graph.pieces.items() if source == name]
            source = self._graph.pieces[name][0] if name in self._graph.pieces else name
            found.update(dict.fromkeys(self._ties.get(n, n) for n in parts or [source]))
        yield from found

    def _in_file(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of parameters of the graph as files hold them: pieces joined, stacks of experts apart."""
        found: dict[str, Tensor] = {}
        joined: dict[str, list[tuple[int, int, Tensor]]] = {}
        for name, value in wholes.items():
            parts = sorted(
                (start, part) for part, (source, _, start, _) in self._graph.pieces.items() if source == name
            )
            if name in self._graph.pieces:
                source, dim, start, _ = self._graph.pieces[name]
                joined.setdefault(source, []).append((start, dim, value))
            elif parts:
                found.update({part: value[number] for number, (_, part) in enumerate(parts)})
            else:
                found[name] = value
        for source, some in joined.items():
            ordered = sorted(some, key=lambda piece: piece[0])
            found[source] = torch.cat([value for *_, value in ordered], ordered[0][1])
        return {self._ties.get(name, name): value.contiguous() for name, value in found.items()}


def _shaped(moments: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The moments that have the shape of their parameter; other values of an optimizer count steps.

    If a parameter has a single element, its count of steps is returned too.
    """
    return {leaf: moment for leaf, moment in moments.items() if moment.shape == held[leaf].shape}
