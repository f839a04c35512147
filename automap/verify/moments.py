"""The memory of a rank in one moment of a step, counted piece by piece. Units: bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from automap.arrays import Floats
from automap.verify.parameters import Held


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Memory that backward passes need: a tensor, or a copy of it in another placement."""

    root: str
    """The tensor that the piece is a view or a copy of."""
    tensor: str
    """The tensor whose memory it is, itself no view of a tensor in the same placement."""
    place: tuple[tuple[str, str], ...]
    """(axis, placement) of the piece."""
    share: float
    """The bytes of an element over those of the activation: less than 1 where it was quantised."""
    size: float
    """The bytes on one device."""
    whole: float
    """The bytes of the whole tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Bytes in memory, each as an array of three numbers: the least estimate that is accepted, the count of this
    module, and the largest estimate that is accepted."""

    activations: Floats
    """Saved activations, and those of a unit that is being recomputed."""
    gradients: Floats
    """Gradients."""
    working: Floats
    """Bytes that a pass needs besides."""

    @property
    def total(self) -> Floats:
        """The sum of all three."""
        found: Floats = self.activations + self.gradients + self.working
        return found

    @staticmethod
    def fullest(some: Sequence[Moment]) -> Moment:
        """For each of the three numbers, the moment in which its total is largest."""
        best = np.argmax([one.total for one in some], axis=0)

        activations, gradients, working = (
            np.array([parts[moment][i] for i, moment in enumerate(best.tolist())])
            for parts in zip(*((one.activations, one.gradients, one.working) for one in some), strict=True)
        )
        return Moment(activations=activations, gradients=gradients, working=working)


class Pieces:
    """The bytes of the pieces of units, which are added one after another.

    Args:
        carried: tensors that stages hand on; for views, the tensors that they are views of.
        viewed: tensors that have views.
    """

    def __init__(self, carried: frozenset[str], viewed: frozenset[str]) -> None:
        self._carried, self._viewed = carried, viewed
        self._known: set[Piece] = set()
        self._sizes: set[tuple[str, float]] = set()
        self._low = self._counted = self._high = 0.0

    def add(self, kept: set[Piece], most: set[Piece]) -> None:
        """Adds a unit.

        Args:
            kept: the pieces that it needs.
            most: the pieces that the price may count.
        """
        for piece in kept - self._known:
            self._counted += piece.size
            # Views of equal size may be the same memory. The price may count no bytes of a carried tensor.
            same = (piece.root, piece.size)
            if piece.root not in self._carried and not (piece.root in self._viewed and same in self._sizes):
                self._low += piece.size
            self._sizes.add(same)
        self._known |= kept
        self._high += sum(piece.whole if piece.root in self._carried else piece.size for piece in most)

    def leave_out(self, pieces: set[Piece]) -> None:
        """Marks pieces as already in memory; units that are added later do not count them."""
        self._known |= pieces
        self._sizes |= {(piece.root, piece.size) for piece in pieces}

    def counts(self) -> Floats:
        """The three numbers of `Moment`."""
        return np.array([self._low, self._counted, self._high])


class Gradients:
    """The bytes of the gradients that the backward passes of units allocate; units are added one after another.

    Args:
        size: the bytes of one gradient.
    """

    def __init__(self, size: Callable[[Held], float]) -> None:
        self._size, self._made = size, dict[str, float]()
        self._high = 0.0

    def add(self, held: Mapping[str, Held]) -> None:
        """Adds a unit with the parameters that it reads."""
        for name, one in held.items():
            size = self._size(one)
            self._made[name] = max(self._made.get(name, 0.0), size)
            self._high += size

    def counts(self) -> Floats:
        """The three numbers of `Moment`."""
        made = math.fsum(self._made.values())
        return np.array([made, made, self._high])
