"""Inputs and results of a relaxation: memory and state, and lower bounds of units. Units: seconds, bytes."""

from __future__ import annotations

from dataclasses import dataclass

from automap.arrays import Floats
from automap.cost_graph.paths import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class OfTypes:
    """Lower bounds for all units of each type by themselves, in each legal recompute mode."""

    fast_s: Floats
    """[modes, types] weighted seconds."""
    priced_s: Floats
    """[modes, types] weighted seconds, plus the price of the state: parameters, gradients and moments."""
    price_s: float
    """Price of a byte of state in `priced_s`, in seconds; 0: state has no price."""
    least_bytes: Floats
    """[types] least bytes of state; 0 where memory is not short."""
    picked: tuple[int, ...]
    """The best assignment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Undecided:
    """Lower bounds for all units of each type by themselves, with every signature undecided."""

    forward_s: Floats
    """[modes, types] seconds of a forward pass of one micro-batch."""
    backward_s: Floats
    """[modes, types] seconds of a backward pass, and of what runs again before it."""
    gradients_s: Floats
    """[modes, types] seconds of the update; no gradient is reduced."""
    state_bytes: Floats
    """[types] bytes of parameters, gradients and moments."""

    def on(self, path: Path) -> Floats:
        """[modes, types] seconds that have the weights of a path."""
        found: Floats = path.forward * self.forward_s + path.backward * self.backward_s
        return found + path.gradients * self.gradients_s


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """How parameters, gradients and moments are held."""

    zeros: tuple[int, ...]
    """ZeRO stages that are possible."""
    makes_gradients: bool
    """Whether gradients take the place of activations, so that only these are sure to be held; see
    `automap.price.kernels.memory.makes_gradients`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory of all ranks together."""

    room: float
    """Bytes that state and what is saved for the backward pass may take."""
    in_flight: int
    """Micro-batches for which each rank keeps at least what it saves."""
