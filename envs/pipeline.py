"""PipelineEnv: the pipeline paradigm. The agent decides stages, cuts, virtual stages, recompute and ZeRO.

Operators are sharded in the Megatron manner of `automap.templates` for the mesh that it chose.
"""

from __future__ import annotations

from automap.prefix import Prefix
from automap.space import Slot, Values
from automap.templates import megatron_signatures
from envs.decision import PlanEnv


class PipelineEnv(PlanEnv):
    """Decides everything but the signatures."""

    _completed: Values = ()

    def decides(self, slot: Slot) -> bool:
        """All but signatures."""
        return slot.kind != "signature"

    def default(self, prefix: Prefix) -> int:
        """Megatron's signature for the shape."""
        head = tuple(prefix.values[: self.space.first_signature])
        if self._completed[: len(head)] != head:
            assert prefix.shape is not None
            self._completed = megatron_signatures(self.space, prefix.shape, head, sequence_parallel=False)
        return self._completed[prefix.position]
