"""Compiles the kernels that Python calls into their cache, or reads them from it; run once by `make setup`."""

from automap.bounds.kernels.step_many import step_many
from automap.bounds.kernels.unit_floors import floors, settled
from automap.cost_graph.kernels.group_costs import exchange, vary
from automap.cost_graph.kernels.message_passing import pass_messages
from automap.price.kernels.pipeline import count_actions, run_program
from automap.price.kernels.placements import divides
from automap.price.kernels.step import combine, new_room, overflow, passes, step_time_s
from automap.price.kernels.tied_parameters import add_read, begin, read_too
from automap.price.kernels.unit import shard_unit, unit_cost
from automap.price.kernels.unit_workspace import new_sharded
from automap.space.kernels.masks import count_decades, mode_mask, signature_mask, size_mask
from automap.space.kernels.neighbours import move_many
from automap.space.kernels.price_many import price_many
from automap.space.kernels.sample import draw_many


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
        mode_mask,
        size_mask,
        begin,
        read_too,
        add_read,
        price_many,
        draw_many,
        move_many,
        floors,
        settled,
        step_many,
        vary,
        exchange,
        pass_messages,
    ):
        kernel.compile()


if __name__ == "__main__":
    main()
