"""How early the mesh of the best plan known stands in the orders by which a search could try meshes.

    python benchmarks/mesh_order.py [--only WORD] [--known benchmarks/best_known.json]

The problems are those of `benchmarks/network_gap.py` whose best plan known lies in the plan space, is at least 1 %
faster than the best template and is still of today's price. The DQN alone knows only the templates at first, and takes
each mesh with its best known plan. Four orders of the meshes are compared:

- bound: by the lower bound on the step time;
- price: by the step time of the best known plan, with a penalty if it does not fit;
- trained: by the step time that the network of the package expects when only the mesh is decided. As in a search, it
  rates only the first meshes by price (`RATED` of `agents/learning/solved_proposals.py`); the others follow by price;
- untrained: the same with a network that has learnt nothing.

Prints for each problem the number of meshes and the place of the best plan's mesh in each order, 1 being the first;
then how often it is among the first 1, 3 and 8, and the geometric mean of the places.
"""

import argparse
import statistics
from pathlib import Path

import numpy as np
from network_gap import UNTRAINED, Known, priced, problems

from agents import Budget
from agents.learning.checkpoint import read_network
from agents.learning.mesh_plans import MeshPlans
from agents.learning.network import ProposalNetwork
from agents.learning.proposals import NETWORK
from agents.learning.solved_proposals import RATED, expected_of_meshes
from agents.sampling.expert import Grid
from automap.bounds.partial_plans import BoundTable
from automap.space.space import Ints, PlanSpace, Values
from envs.decision import Episodes
from envs.hybrid import HybridDecisions

EPISODES = 32
"""Number of meshes that are rated at the same time."""
LEAST_GAP = 0.01
"""Problems whose best template is nearer to the best plan known are left out: any order would do."""
ORDERS = ("bound", "price", "trained", "untrained")
FIRST = (1, 3, 8)
"""Numbers of first places that are counted."""


def places(space: PlanSpace, grid: Grid, best: Values, network: ProposalNetwork) -> tuple[int, dict[str, int]]:
    """The number of meshes, and the place of the mesh of a plan in each of the orders."""
    table = BoundTable(space)
    episodes = Episodes(HybridDecisions(space), EPISODES, table, known=grid)
    meshes, size = MeshPlans(episodes, table), space.first.schedule
    by_price = meshes.ranked()
    orders = {"bound": np.argsort(meshes.bound_s, kind="stable"), "price": by_price}
    rated = [tuple(row) for row in meshes.values[by_price[:RATED]].tolist()]
    for kind, judge in (("trained", network), ("untrained", UNTRAINED)):
        expected_s = expected_of_meshes(episodes, judge, rated, meshes.num_slots)
        ranked = by_price[: len(rated)][np.argsort(expected_s, kind="stable")]
        orders[kind] = np.concatenate([ranked, by_price[len(rated) :]])
    return len(np.unique(meshes.values[:, :size], axis=0)), {
        kind: place(meshes.values[order, :size], best[:size]) for kind, order in orders.items()
    }


def place(shapes: Ints, shape: Values) -> int:
    """The place of a shape among the distinct rows of [n, slots] shapes, 1 being the first."""
    return list(dict.fromkeys(map(tuple, shapes.tolist()))).index(shape) + 1


def main() -> None:
    """One line a problem, then a summary for each order."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="only problems with this word in their name")
    parser.add_argument("--known", type=Path, default=Path(__file__).parent / "best_known.json")
    given = parser.parse_args()
    known, network, found = Known(given.known, Budget()), read_network(NETWORK), []
    for name, build in problems():
        entry = known.found.get(name)
        if given.only not in name or entry is None or "plan" not in entry:
            continue
        space, grid, template_s = priced(build())
        if not known.is_of_this_price(name, space, template_s) or template_s is None:
            continue
        if template_s < (1.0 + LEAST_GAP) * entry["best_s"]:
            continue
        best = tuple(map(int, entry["plan"].split()))
        count, one = places(space, grid, best, network)
        found.append(one)
        print(f"{count:5} meshes, {', '.join(f'{kind} {one[kind]}' for kind in ORDERS)}  {name}", flush=True)
    for kind in ORDERS if found else ():
        of = [one[kind] for one in found]
        near = ", ".join(f"first {most} on {sum(at <= most for at in of)}" for most in FIRST)
        print(f"{kind:9}: {near} of {len(of)} problems, geometric mean {statistics.geometric_mean(of):.1f}")


if __name__ == "__main__":
    main()
