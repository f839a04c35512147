"""Inputs and results of a relaxation: memory and state, and lower bounds of units. Units: seconds, bytes."""

from __future__ import annotations

from dataclasses import dataclass

from automap.arrays import Floats
from automap.cost_graph.paths import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class OfTypes:
    """Separate lower bounds for all units of each type, in each legal recompute mode."""

    fast_s: Floats
    """[modes, types] weighted seconds."""
    priced_s: Floats
    """[modes, types] weighted seconds, plus the price of the state: parameters, gradients and moments."""
    price_s: float
    """Price of a byte of state in `priced_s`, in seconds; 0: state has no price."""
    least_bytes: Floats
    """[types] lower bound on the bytes of state; 0 where memory is not short."""
    picked: tuple[int, ...]
    """The best assignment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Undecided:
    """Separate lower bounds for all units of each type, with every signature undecided."""

    forward_s: Floats
    """[modes, types] seconds of a forward pass of one micro-batch."""
    backward_s: Floats
    """[modes, types] seconds of a backward pass, with recomputation."""
    gradients_s: Floats
    """[modes, types] seconds of the update; without signatures no gradient is reduced."""
    state_bytes: Floats
    """[types] bytes of parameters, gradients and moments."""

    def on(self, path: Path) -> Floats:
        """[modes, types] sum of these seconds with the weights of a path."""
        found: Floats = path.forward * self.forward_s + path.backward * self.backward_s
        return found + path.gradients * self.gradients_s


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Conditions for the memory of parameters, gradients and moments."""

    zeros: tuple[int, ...]
    """ZeRO stages that are possible."""
    makes_gradients: bool
    """Whether the backward pass allocates gradients while it frees activations. Then only one of the two counts in a
    lower bound; see `automap.price.kernels.memory.makes_gradients`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory of all ranks together."""

    room: float
    """Bytes that state and saved activations may take."""
    in_flight: int
    """Lower bound on the micro-batches in flight on each rank."""
