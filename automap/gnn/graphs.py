"""Graphs to profile: random ones with a power law of degrees, or read from an edge list; their partitions and samples.

A graph is a symmetric CSR matrix of ones. pymetis partitions it if it is installed; otherwise nodes are assigned
greedily, in the order of a breadth-first search (linear deterministic greedy, Stanton and Kliot, KDD 2012).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from automap.arrays import Ints
from automap.errors import ProblemError

Graph = Any
"""A `scipy.sparse.csr_matrix`, symmetric, without self-loops."""
EXPONENT = 0.5
"""Exponent of a node's weight over its rank: degrees have a tail of exponent 3, as with preferential attachment."""
MIXING = 0.2
"""Share of the edges of a made-up graph that leave their community (assumed)."""
COMMUNITY = 500
"""Nodes of a community of a made-up graph (assumed)."""
MOST_EDGES = 200_000_000
"""Largest number of edges in a file, which need some gigabytes of memory (assumed)."""


def power_law_graph(nodes: int, degree: float, rng: np.random.Generator) -> Graph:
    """A random graph with a power law of degrees and communities.

    Args:
        nodes: number of nodes.
        degree: mean number of neighbours, before edges that were drawn twice are merged.
        rng: where randomness comes from.
    """
    count = int(nodes * degree / 2)
    weight = (1.0 + rng.permutation(nodes)) ** -EXPONENT
    heads = rng.choice(nodes, count, p=weight / weight.sum())
    tails = rng.choice(nodes, count, p=weight / weight.sum())
    near = rng.random(count) > MIXING
    tails[near] = np.minimum(heads[near] // COMMUNITY * COMMUNITY + tails[near] % COMMUNITY, nodes - 1)
    return _graph(heads, tails, nodes)


def read_edges(path: Path) -> Graph:
    """A graph from a text file with an edge in each line: two whole numbers; lines with # are comments.

    Raises:
        ProblemError: the file cannot be read, a line is not an edge, or there are none.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        why = fault.strerror if isinstance(fault, OSError) else "no text"
        repair = "Name a text file with two numbers a line."
        raise ProblemError(f"cannot be read ({why})", field="edges", value=str(path), repair=repair) from None
    pairs: list[int] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) < 2 or not all(map(_is_node, words[:2])):
            repair = "Write two whole numbers from 0 to 2^63 - 1, with a blank, a tab or a comma between them."
            raise ProblemError("not an edge", field=f"edges, line {number}", value=line[:60], repair=repair)
        pairs += int(words[0]), int(words[1])
        if len(pairs) > 2 * MOST_EDGES:
            raise ProblemError("too many edges", field="edges", value=str(path), repair=f"Give at most {MOST_EDGES:,}.")
    if not pairs:
        raise ProblemError("has no edges", field="edges", value=str(path), repair="Write two numbers a line.")
    # Numbers of nodes need not be consecutive in the file.
    _, numbers = np.unique(np.array(pairs, dtype=np.int64), return_inverse=True)
    return _graph(numbers[::2], numbers[1::2], int(numbers.max()) + 1)


def _is_node(word: str) -> bool:
    """Whether a word of a file is the number of a node, which fits into 64 bits."""
    return word.isascii() and word.isdigit() and len(word) <= 100 and int(word) < 1 << 63


def _graph(heads: Ints, tails: Ints, nodes: int) -> Graph:
    other = heads != tails
    ones = np.ones(2 * int(other.sum()), dtype=np.int8)
    rows = np.concatenate([heads[other], tails[other]])
    columns = np.concatenate([tails[other], heads[other]])
    found = sparse.csr_matrix((ones, (rows, columns)), shape=(nodes, nodes))
    found.data[:] = 1
    return found


def partition(graph: Graph, parts: int) -> tuple[Ints, str]:
    """[nodes] the part of each node, and the name of the partitioner."""
    nodes = graph.shape[0]
    if parts == 1:
        return np.zeros(nodes, dtype=np.int64), "none"
    if importlib.util.find_spec("pymetis") is not None:
        import pymetis

        adjacency = pymetis.CSRAdjacency(graph.indptr.tolist(), graph.indices.tolist())
        _, found = pymetis.part_graph(parts, adjacency=adjacency)
        return np.array(found, dtype=np.int64), "METIS"
    return _greedy_parts(graph, parts), "linear deterministic greedy"


def _greedy_parts(graph: Graph, parts: int) -> Ints:
    nodes, indptr, indices = graph.shape[0], graph.indptr, graph.indices
    found = np.full(nodes, -1, dtype=np.int64)
    room = np.full(parts, 1.05 * nodes / parts)
    size = np.zeros(parts)
    order: list[int] = []
    seen = np.zeros(nodes, dtype=bool)
    for first in range(nodes):
        if not seen[first]:
            reached = csgraph.breadth_first_order(graph, first, directed=False, return_predecessors=False)
            seen[reached] = True
            order += reached.tolist()
    for node in order:
        near = found[indices[indptr[node] : indptr[node + 1]]]
        count = np.bincount(near[near >= 0], minlength=parts)
        best = int(((count + 1e-3) * (1.0 - size / room)).argmax())
        found[node] = best
        size[best] += 1
    return found


def sample_hops(
    graph: Graph, seeds: Ints, fan_outs: Sequence[int], rng: np.random.Generator
) -> Iterator[tuple[Ints, Ints]]:
    """Samples neighbours of seeds, then neighbours of these, and so on.

    A node with no more neighbours than the fan-out takes all of them, any other draws as many as the fan-out with
    replacement, so that it has slightly fewer different ones than with DGL's default.

    Args:
        graph: the graph.
        seeds: [...] nodes to train on.
        fan_outs: neighbours of each node, hop by hop.
        rng: where randomness comes from.

    Yields:
        Of each hop [edges] nodes and [edges] their sampled neighbours.
    """
    front = np.unique(seeds)
    for fan_out in fan_outs:
        begin, degree = graph.indptr[front].astype(np.int64), np.diff(graph.indptr)[front].astype(np.int64)
        few = degree <= fan_out
        counts = degree[few]
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        taken = graph.indices[np.repeat(begin[few], counts) + offsets]
        drawn = (rng.random((int((~few).sum()), fan_out)) * degree[~few, None]).astype(np.int64)
        others = graph.indices[(begin[~few, None] + drawn).ravel()]
        heads = np.concatenate([np.repeat(front[few], counts), np.repeat(front[~few], fan_out)])
        tails = np.concatenate([taken, others]).astype(np.int64)
        yield heads, tails
        front = np.unique(tails)


def sample(graph: Graph, seeds: Ints, fan_outs: Sequence[int], rng: np.random.Generator) -> Ints:
    """[...] the distinct nodes of a mini-batch: its seeds and all sampled neighbours, see `sample_hops`."""
    found = np.unique(seeds)
    for _, tails in sample_hops(graph, seeds, fan_outs, rng):
        found = np.union1d(found, tails)
    return found
