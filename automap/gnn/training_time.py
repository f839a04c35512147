"""The time of this host for a mini-batch: a GraphSAGE with mean aggregation; forward pass, backward pass and update."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from automap.arrays import Ints
from automap.gnn.graphs import Graph, sample_hops

BATCHES = 5
"""Mini-batches that are measured, after one for warm-up."""


def linear_sizes(widths: Sequence[int], hops: int) -> list[tuple[int, int]]:
    """[layers] inputs and outputs of the linear map of each layer; its input is a node and the mean of its neighbours.

    Args:
        widths: sizes of a node's vector: its features, the hidden width after each layer but the last, and its classes.
        hops: number of layers, one for each hop.
    """
    sizes = [widths[0], *[widths[1]] * (hops - 1), widths[2]]
    return [(2 * sizes[n], sizes[n + 1]) for n in range(hops)]


def seconds_a_node(
    graph: Graph, seeds: Sequence[Ints], fan_outs: Sequence[int], widths: Sequence[int], rng: np.random.Generator
) -> tuple[float, str]:
    """Measures training on this host's accelerator, or on its processor if it has none.

    Args:
        graph: the graph; features are random numbers.
        seeds: seeds of each mini-batch; the first one warms up.
        fan_outs: neighbours of a node, hop by hop; one layer a hop.
        widths: see `linear_sizes`.
        rng: random numbers for the samples.

    Returns:
        Seconds for a node of a mini-batch, the median, and the name of the device.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = device or torch.device("cpu")
    layers = [torch.nn.Linear(*sizes, device=device) for sizes in linear_sizes(widths, len(fan_outs))]
    optimizer = torch.optim.Adam([weight for layer in layers for weight in layer.parameters()])
    found = []
    for batch in seeds:
        blocks, nodes = _blocks(graph, batch, fan_outs, rng)
        features = torch.rand(nodes, widths[0], device=device)
        labels = torch.randint(widths[2], (len(np.unique(batch)),), device=device)
        edges = [(torch.from_numpy(h).to(device), torch.from_numpy(t).to(device), count) for h, t, count in blocks]
        _wait()
        begin = time.perf_counter()
        hidden = features
        for layer, (heads, tails, count) in zip(layers, edges, strict=True):
            near = torch.zeros(count, hidden.shape[1], device=device).index_add_(0, heads, hidden[tails])
            degree = torch.bincount(heads, minlength=count).clamp(min=1)
            hidden = layer(torch.cat([hidden[:count], near / degree[:, None]], dim=1))
            hidden = hidden.relu() if layer is not layers[-1] else hidden
        torch.autograd.backward(torch.nn.functional.cross_entropy(hidden, labels))
        optimizer.step()
        optimizer.zero_grad()
        _wait()
        found.append((time.perf_counter() - begin) / nodes)
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    return float(np.median(found[1:])), name


def _wait() -> None:
    """Waits until the accelerator has finished its work."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _blocks(
    graph: Graph, seeds: Ints, fan_outs: Sequence[int], rng: np.random.Generator
) -> tuple[list[tuple[Ints, Ints, int]], int]:
    """The edges over which each layer aggregates, from the first layer on, and the number of nodes of the mini-batch.

    Nodes are numbered in the order in which they were found: seeds first, then those of each hop. So the nodes that a
    layer computes are the first ones of the nodes that it reads.

    Returns:
        For each layer, [edges] nodes, [edges] their neighbours, and the number of nodes that it computes.
    """
    number = np.full(graph.shape[0], -1, dtype=np.int64)
    first = np.unique(seeds)
    number[first] = np.arange(len(first))
    count, edges, blocks = len(first), [], []
    for heads, tails in sample_hops(graph, seeds, fan_outs, rng):
        computed = count
        fresh = np.unique(tails[number[tails] < 0])
        number[fresh] = np.arange(count, count + len(fresh))
        count += len(fresh)
        # Nodes of earlier hops keep the neighbours that were sampled for them.
        edges.append((number[heads], number[tails]))
        blocks.append((np.concatenate([h for h, _ in edges]), np.concatenate([t for _, t in edges]), computed))
    return blocks[::-1], count
