"""Stage programs in which only the batch is sharded: the simplest that the pipeline executor can run."""

import itertools

import torch
import torch.distributed as dist

from automap.runtime.operators.apply import apply
from automap.runtime.operators.base import torch_dtype
from automap.runtime.tensor_layout import StageTensor


def is_had_anywhere(op):
    return op.is_constant or op.is_view


class PlainStage:
    """Operators [start, stop) of a graph; rank i of the stage has shares[i] samples of a micro-batch."""

    def __init__(self, graph, span, shares, num_micro_batches, place, group, values):
        self.graph, self.shares, self.place, self.group = graph, shares, place, group
        self.count = sum(shares) * num_micro_batches
        self.operators = [graph.operators[i] for i in with_views(graph, span)]
        made = {name for op in self.operators for name in op.outputs}
        read = list(dict.fromkeys(name for op in self.operators for name in op.inputs if name not in made))
        trained = trained_tensors(graph)
        self.held = {
            name: StageTensor(
                name=name,
                placements=(graph.tensors[name].batch_dim if graph.tensors[name].batch_dim is not None else -1,),
                shape=graph.tensors[name].shape_at(sum(shares)),
                dtype=torch_dtype(graph.tensors[name].dtype),
                carries_gradient=name in trained,
                boxes=boxes(graph.tensors[name], shares),
            )
            for name in (*read, *made)
        }
        role = {name: graph.tensors[name].role for name in read}
        self.inputs = tuple(self.held[n] for n in read if role[n] == "activation")
        self.data = tuple(self.held[n] for n in read if role[n] == "input")
        live = [n for op in self.operators if not is_had_anywhere(op) for n in op.outputs]
        mine = {op.name for op in self.operators}
        self.outputs = tuple(
            self.held[n] for n in live if any(graph.operators[i].name not in mine for i in graph.consumers[n])
        )
        self.loss = graph.outputs[-1] if graph.outputs[-1] in made else None
        names = [n for n in read if role[n] == "parameter"]
        self.layouts = {n: self.held[n] for n in names}
        self.tied = ()
        self.parameters, self.state = {}, {}
        if values is not None:
            self.parameters = {n: values[n].clone().requires_grad_() for n in names}
            self.state = {n: values[n] for n in read if role[n] in ("buffer", "constant")}

    def weights(self):
        return list(self.parameters.values())

    def forward(self, tensors, micro_batch):
        values = {**self.parameters, **self.state, **tensors}
        for op in self.operators:
            operands = [values[name] for name in op.inputs]
            results = apply(op, self.graph.tensors, operands, self.shares[self.place])
            values.update(zip(op.outputs, results, strict=True))
        if self.loss is not None:
            values[self.loss] = values[self.loss] / self.count
        return {name: values[name] for name in [c.name for c in self.outputs] + [self.loss] * bool(self.loss)}

    def total_loss(self, losses):
        return self.summed(losses)

    def summed(self, tensor):
        if len(self.shares) > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def tied_gradients(self):
        for parameter in self.parameters.values():
            parameter.grad = self.summed(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        return {name: parameter.grad for name, parameter in self.parameters.items()}

    def finish(self):
        pass

    def refresh(self):
        pass


def trained_tensors(graph):
    """Floating-point tensors that depend on a parameter."""
    found = {t.name for t in graph.parameters if t.is_float}
    for op in graph.operators:
        if any(name in found for name in op.inputs):
            found.update(name for name in op.outputs if graph.tensors[name].is_float)
    return found


def with_views(graph, span):
    """Operators of a span without its constants and views, and all constants and views that they need from anywhere."""
    found = {i for i in span if not is_had_anywhere(graph.operators[i])}
    pending = sorted(found)
    while pending:
        for name in graph.operators[pending.pop()].inputs:
            maker = graph.producer.get(name)
            if maker is not None and maker not in found and is_had_anywhere(graph.operators[maker]):
                found.add(maker)
                pending.append(maker)
    return sorted(found)


def boxes(tensor, shares):
    """What each rank holds."""
    found = []
    for first, last in itertools.pairwise(itertools.accumulate(shares, initial=0)):
        found.append(
            tuple(
                (first * size, last * size) if dim == tensor.batch_dim else (0, size)
                for dim, size in enumerate(tensor.shape)
            )
        )
    return tuple(found)


def random_values(graph, seed=0):
    """A value for each parameter, buffer and stored constant."""
    generator = torch.Generator().manual_seed(seed)
    return {
        t.name: torch.randn(t.shape, generator=generator) / max(t.shape[0], 1) ** 0.5
        for t in graph.tensors.values()
        if t.name not in graph.producer and t.role != "input"
    }


def random_data(graph, num_samples, num_micro_batches, limit, seed=1):
    """[micro-batches] a value for each input; integers below `limit`."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num_micro_batches):
        tensors = {}
        for t in graph.tensors.values():
            if t.role == "input" and t.is_float:
                tensors[t.name] = torch.randn(t.shape_at(num_samples), generator=generator)
            elif t.role == "input":
                tensors[t.name] = torch.randint(limit, t.shape_at(num_samples), generator=generator)
        found.append(tensors)
    return found
