"""Small graphs, and problems over them.

Fixtures import what they need: the process that hands tests out reads this file before it starts those that run them.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import rank_device

if TYPE_CHECKING:
    from automap.space.space import PlanSpace
    from ir.graph import Graph

# Tests do not read the device files of the user who runs them.
os.environ["XDG_CONFIG_HOME"] = str(Path(__file__).parent / "no-configuration")
_LIGHT: dict[str, Graph] = {}
# No deadline: the time of an example depends on how busy the host is.
hypothesis.settings.register_profile(
    "busy host", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy host")
# What is imported while tests are collected stays for good: searching it for garbage would take 4 of 16 s.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--device cuda`: ranks of tests run on the GPUs of this host, see `make test-gpu`."""
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where ranks of tests run")


def pytest_configure(config: pytest.Config) -> None:
    """Passes the device on to all processes that follow."""
    rank_device.choose(config.getoption("--device"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with most slow tests come first: no process is left with a long file when the others have ended.

    Every third file is one whose tests wait for servers, as long as there are some: if more of them ran at a time,
    processors would be idle.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    files = sorted(dict.fromkeys(item.path for item in items), key=lambda path: -slow[path])
    waiting = [path for path in files if slow[path] and path.parent.name == "service"]
    others = [path for path in files if path not in waiting]
    turns = itertools.zip_longest(waiting, others[::2], others[1::2])
    place = {path: number for number, path in enumerate(itertools.chain.from_iterable(turns))}
    items.sort(key=lambda item: place[item.path])


def pytest_collection_finish() -> None:
    """Collects garbage from now on, except for what was imported; if torch was imported, exports share what they
    read."""
    if "torch" in sys.modules:
        import kept_exporter

        kept_exporter.keep()
    gc.freeze()
    # A tenth of the collections of Python's own thresholds, which took 2.4 of 24 s of the exports of four models.
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says at the end, where nobody overlooks it, what this machine could not run."""
    found = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    for reason in sorted({text for text in found if "not run:" in text}):
        terminalreporter.write_line(reason.removeprefix("Skipped: "))


@pytest.fixture(scope="session")
def light_graph() -> Callable[[str], Graph]:
    """`light_graph(name)`: one of the nine light models."""
    import onnx

    from ir.onnx.load import load_model

    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"

    def get(name: str) -> Graph:
        if name not in _LIGHT:
            _LIGHT[name] = load_model((folder / f"light_{name}.onnx").read_bytes(), name=name)
        return _LIGHT[name]

    return get


@pytest.fixture(scope="session")
def gpt() -> Callable[..., Graph]:
    """`gpt(layers=2, hidden=64, heads=4, seq=32, vocab=128)`."""
    from small_graphs import build_gpt

    return build_gpt


@pytest.fixture(scope="session")
def mlp() -> Callable[..., Graph]:
    """`mlp(widths)`."""
    from small_graphs import build_mlp

    return build_mlp


@pytest.fixture(scope="session")
def space() -> Callable[..., PlanSpace]:
    """`space(graph, cluster, global_batch, **hints_fix)`."""
    from automap.cluster import parse_cluster
    from automap.problem import Problem
    from automap.space.space import PlanSpace

    def make(graph: Graph, cluster: str, global_batch: int, *, training: dict | None = None, **fix) -> PlanSpace:
        problem = Problem.build(
            graph, parse_cluster(cluster), {"global_batch": global_batch, **(training or {})}, {"fix": fix}
        )
        return PlanSpace(problem)

    return make
