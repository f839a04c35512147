"""Compiles the kernels that Python calls into their cache, or reads them from it; run once by `make setup`."""

from automap.bounds.kernels.step_many import step_many
from automap.bounds.kernels.unit_lower_bounds import forced_signatures, unit_lower_bounds
from automap.cost_graph.kernels import exchange, vary
from automap.cost_graph.message_passing import tighten
from automap.price.kernels.memory import in_flight, state_bytes
from automap.price.kernels.passes import passes
from automap.price.kernels.pipeline import count_actions, run_program
from automap.price.kernels.placements import divides, write_crossing
from automap.price.kernels.shard_unit import shard_unit
from automap.price.kernels.step import overflow, step, step_time_s
from automap.price.kernels.step_records import new_step_workspace
from automap.price.kernels.tied_parameters import begin, read_too, write_share, write_tie
from automap.price.kernels.unit import unit_cost
from automap.price.kernels.unit_workspace import new_unit_workspace
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
        new_unit_workspace,
        shard_unit,
        unit_cost,
        divides,
        write_crossing,
        in_flight,
        state_bytes,
        count_actions,
        run_program,
        passes,
        new_step_workspace,
        step,
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
        write_share,
        write_tie,
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
