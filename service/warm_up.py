"""Compiles the kernels that Python calls into their cache, or reads them from it; run once by `make setup`."""

from automap.bounds.kernels.step_many import step_many
from automap.bounds.kernels.unit_lower_bounds import forced_signatures, unit_lower_bounds
from automap.cost_graph.kernels import exchange, vary
from automap.cost_graph.message_passing import tighten
from automap.price.kernels.pipeline import count_actions, run_program
from automap.price.kernels.placements import divides
from automap.price.kernels.step import combine, new_room, overflow, passes, step_time_s
from automap.price.kernels.tied_parameters import add_read, begin, read_too
from automap.price.kernels.unit import shard_unit, unit_cost
from automap.price.kernels.unit_workspace import new_sharded
from automap.space.kernels.cuts import list_cuts
from automap.space.kernels.masks import count_decades, signature_mask
from automap.space.kernels.neighbours import move_many
from automap.space.kernels.price_many import price_many
from automap.space.kernels.sample import sample_many
from automap.space.kernels.stepper import follow, repair
from automap.space.kernels.workspace import new_workspace


def main() -> None:
    """After it, no call of a kernel waits for more than its work."""
    for kernel in (
        new_sharded,
        shard_unit,
        unit_cost,
        divides,
        count_actions,
        run_program,
        passes,
        new_room,
        combine,
        overflow,
        step_time_s,
        signature_mask,
        count_decades,
        list_cuts,
        new_workspace,
        follow,
        repair,
        begin,
        read_too,
        add_read,
        price_many,
        sample_many,
        move_many,
        unit_lower_bounds,
        forced_signatures,
        step_many,
        vary,
        exchange,
        tighten,
    ):
        kernel.compile()


if __name__ == "__main__":
    main()
