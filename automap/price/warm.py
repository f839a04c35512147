"""Compiles every numba kernel into its cache; run once by `make setup`."""

from automap.price.ahead import look_ahead
from automap.price.attention import attention_s
from automap.price.batch import price_many
from automap.price.combine import combine
from automap.price.communication import convert
from automap.price.draw import draw_many
from automap.price.gemm import gemm_s
from automap.price.legality import count_signatures
from automap.price.placements import divides
from automap.price.schedule import run_schedule
from automap.price.unit import shard_unit, unit_cost


def main() -> None:
    """Importing the kernels compiles them: their signatures are eager."""
    for kernel in (
        convert,
        shard_unit,
        unit_cost,
        divides,
        run_schedule,
        combine,
        look_ahead,
        price_many,
        draw_many,
        count_signatures,
        gemm_s,
        attention_s,
    ):
        kernel.compile()


if __name__ == "__main__":
    main()
