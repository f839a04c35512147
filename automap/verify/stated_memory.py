"""The memory that an estimate states, against the recount and against what the devices have. Units: bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from automap.plan import Plan
from automap.verify.memory import GIB, Recount
from automap.verify.model import Model
from automap.verify.reading import Chunk, Violation

TOLERANCE = 1e-6
"""The relative difference at which two counts are equal; both are sums of the same terms."""


def check_memory(plan: Plan, chunks: Sequence[Chunk], model: Model) -> Iterator[Violation]:
    """Compares the memory of the estimate with the recount, and the recount with the capacity of the devices."""
    found = Recount(plan, chunks, model).devices()
    for rank, (mine, _) in enumerate(found):
        if mine.total > mine.capacity - mine.reserve:
            room = f"{mine.capacity / GIB:.2f}"
            if mine.reserve > 0.0:
                room += f", {mine.reserve / GIB:.2f} of them kept free,"
            yield Violation(
                f"stages[{rank}].devices", f"does not fit: {mine.total / GIB:.2f} GiB of {room} on {mine.devices}"
            )
    if plan.estimate is None:
        return
    stated = plan.estimate.memory_bytes
    if [m.devices for m in stated] != [m.devices for m, _ in found]:
        yield Violation("estimate.memory_bytes", f"not about {', '.join(m.devices for m, _ in found)}")
        return
    for rank, (said, (mine, held)) in enumerate(zip(stated, found, strict=True)):
        where = f"estimate.memory_bytes[{rank}]"
        for name in ("parameters", "optimizer", "capacity", "reserve"):
            if not math.isclose(getattr(said, name), getattr(mine, name), rel_tol=TOLERANCE, abs_tol=1.0):
                what = f"says {getattr(said, name):.0f} bytes, counted {getattr(mine, name):.0f}"
                yield Violation(f"{where}.{name}", what)
        low, counted, high = held.total.tolist()
        together = said.activations + said.gradients + said.buffers
        if not low * (1.0 - TOLERANCE) - 1.0 <= together <= high * (1.0 + TOLERANCE) + 1.0:
            what = f"says {together:.0f} bytes of activations, gradients and buffers, counted {counted:.0f}"
            yield Violation(where, f"{what}, {low:.0f} to {high:.0f}")
