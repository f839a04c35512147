"""Generated problems: a seed gives one problem, splits hold apart what they say, and everything can be planned."""

import hashlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from agents.learning.problems import SPLITS, blocks, generate, outline
from agents.learning.problems.clusters import is_prime
from agents.learning.problems.models import OTHERS, TRANSFORMERS
from agents.learning.problems.transformers import DEEP, is_named
from automap.space.space import PlanSpace
from ir import zoo
from ir.graph import Graph
from ir.serialize import graph_digest, graph_to_json
from ir.summary import summarize

MANY = 300
HELD_OUT = {"bert", "encoder", "shared-experts", "pyramid"}


def test_the_same_seed_gives_the_same_problem() -> None:
    for seed in range(5):
        first, second = generate(seed), generate(seed)
        assert first.digest == second.digest
        assert (
            first.description
            == second.description
            == outline(seed).description + first.description.removeprefix(outline(seed).description)
        )
        assert first.split == outline(seed).split
    assert len({generate(seed).digest for seed in range(5)}) == 5


def test_the_problems_of_seeds_are_those_that_labels_and_networks_were_made_of() -> None:
    """Other data files of devices and links change none of them. Whoever changes the draws makes both anew."""
    drawn = hashlib.sha256("".join(outline(seed).description for seed in range(MANY)).encode()).hexdigest()
    assert drawn == "7318e42b8299d47fa068135b670fc56fa28740399000ecd7925014382d6ff393"


def test_each_split_holds_what_it_says() -> None:
    for found in map(outline, range(MANY)):
        devices = found.cluster.cluster.num_devices
        is_large = found.model.num_blocks > 40 or devices > 256 or (devices > 7 and is_prime(devices))
        assert 1 <= devices <= 1024
        if found.model.family in HELD_OUT:
            assert found.split == "unseen-family"
        else:
            assert found.split == ("unseen-size" if is_large else "train")


def test_no_two_splits_share_a_problem() -> None:
    of_split: dict[str, set[str]] = {split: set() for split in SPLITS}
    for found in map(outline, range(MANY)):
        of_split[found.split].add(found.description)
    assert sum(map(len, of_split.values())) == len(set.union(*of_split.values())) == MANY
    assert all(len(some) > MANY / 10 for some in of_split.values())


def test_families_and_sizes_are_mixed() -> None:
    drawn = [outline(seed) for seed in range(MANY)]
    assert set(Counter(found.model.family for found in drawn)) == {*TRANSFORMERS, *OTHERS}
    devices = [found.cluster.cluster.num_devices for found in drawn]
    usual = sum(4 <= n <= 512 for n, found in zip(devices, drawn, strict=True) if found.model.family in TRANSFORMERS)
    assert usual > MANY / 2
    assert len(set(devices)) > 60
    assert sum(found.cluster.cluster.bandwidth_GBps is not None for found in drawn) > 3
    assert sum(len(found.cluster.cluster.nodes) > 1 for found in drawn) > MANY / 20
    assert len({found.training["trainer"] for found in drawn}) > 10


def test_no_generated_model_has_the_depth_and_width_of_a_named_one() -> None:
    for name, family in (("gpt2-xl", "gpt"), ("llama-70b", "llama"), ("t5-11b", "t5"), ("vit-l", "vit")):
        known = zoo.NAMED[name]
        assert is_named(family, {"layers": getattr(known, "layers"), "hidden": getattr(known, "hidden")})  # noqa: B009
    for found in map(outline, range(MANY)):
        family, _, rest = found.model.text.partition(":")
        if family in zoo.FAMILIES:
            pairs = dict(pair.split("=") for pair in rest.split(","))
            sizes = {k: tuple(map(int, v.split("-"))) if k in ("blocks", "convolutions") else int(v)
                     for k, v in pairs.items()}  # fmt: skip
            assert not is_named(family, sizes), found.model.text


@pytest.mark.slow
def test_every_problem_has_a_space_and_prices() -> None:
    for seed in range(20):
        found = generate(seed)
        space = PlanSpace(found.problem)
        values = space.random_batch(np.random.default_rng(seed), 4)
        assert np.isfinite(space.price(values)).all(), found.description
        assert space.encode(space.decode(values[0].tolist())) is not None, found.description


def test_copied_blocks_are_those_that_would_be_built(monkeypatch) -> None:
    kinds = ("decoder", "encoder", "blocks", "encoder-decoder")
    few = [
        found for found in map(outline, range(MANY)) if found.model.family in kinds and 4 <= found.model.num_blocks <= 7
    ]
    assert {found.model.family for found in few} == set(kinds)
    copied = [graph_to_json(found.model.build()) for found in few]
    monkeypatch.setattr(blocks, "BUILT", 100)
    for found, document in zip(few, copied, strict=True):
        assert graph_to_json(found.model.build()) == document, found.description


@pytest.mark.slow
@pytest.mark.long
def test_graphs_are_those_of_the_description_and_never_a_named_model() -> None:
    def digest(graph: Graph) -> str:
        return graph_digest(replace(graph, name=""))

    known = {digest(zoo.build(name)) for name in zoo.NAMED}
    assert digest(zoo.build("gpt:layers=12,hidden=768,heads=12,positions=1024")) in known
    for seed in range(100, 160):
        found, graph = outline(seed), generate(seed).problem.graph
        assert digest(graph) not in known
        assert not any("replicated" in warning for warning in graph.warnings), (seed, graph.warnings)
        if found.model.family in TRANSFORMERS and found.model.num_blocks > 4:
            blocks = summarize(graph)["num_blocks"]
            assert (blocks > DEEP) == (found.model.num_blocks > DEEP), found.description
