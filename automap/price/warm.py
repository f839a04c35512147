"""Compiles the kernels that Python calls into their cache, or reads them from it; run once by `make setup`."""

from automap.price.batch import price_many
from automap.price.combine import combine, new_room, overflow, passes, step_time_s
from automap.price.draw import draw_many
from automap.price.edges import exchange, vary
from automap.price.floors import floors, settled
from automap.price.legality import count_decades, mode_mask, signature_mask, size_mask
from automap.price.moves import move_many
from automap.price.placements import divides
from automap.price.schedule import count_actions, run_program
from automap.price.sharded import new_sharded
from automap.price.ties import add_read, begin, read_too
from automap.price.unit import shard_unit, unit_cost
from automap.price.walk import step_many
from automap.tightening import tighten


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
        tighten,
    ):
        kernel.compile()


if __name__ == "__main__":
    main()
