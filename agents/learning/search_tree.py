"""The search tree: the decisions that a search has taken, and after which of them a better plan is still possible."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from automap.space.space import Values
from envs.decision import Episodes

Ints = npt.NDArray[np.int64]


class _Node:
    """A partial plan, or a complete one, which has no actions.

    Attributes:
        parent: the partial plan before the last decision; None at the root.
        place: index of that decision among the actions of the parent.
        actions: legal actions, ascending. They are few, so that lists take less time than arrays.
        bounds: lower bound on the step time after each action, in seconds.
        is_closed: whether nothing is left to explore after each action.
        children: node after each action that has been taken, by index.
    """

    __slots__ = ("actions", "bounds", "children", "is_closed", "parent", "place")

    def __init__(self, parent: _Node | None, place: int) -> None:
        self.parent, self.place = parent, place
        self.actions: list[int] = []
        self.bounds: list[float] = []
        self.is_closed: list[bool] = []
        self.children: dict[int, _Node] = {}

    def is_open(self, best_s: float) -> bool:
        """Whether some action is open that may lead to a plan faster than `best_s`."""
        return any(not closed and bound < best_s for closed, bound in zip(self.is_closed, self.bounds, strict=True))


class SearchTree:
    """The tree of all partial plans that episodes have reached, in which actions are open or closed.

    An action is closed if each plan that begins with it has been priced, or is by its lower bound no faster than the
    best plan so far. A closed action is taken only where no action is open. So as long as one is open, no plan is
    priced twice and no plan that cannot be the best is priced.

    Attributes:
        priced: plans that episodes have decided and priced, also without the tree.
        best_s: returns the step time of the best plan so far, in the units of the bounds.
        is_exhausted: whether no plan that the episodes may decide can be faster than the best one.
    """

    def __init__(self, episodes: Episodes, best_s: Callable[[], float]) -> None:
        """Begins with nothing explored.

        Args:
            episodes: episodes of one problem, at their beginning.
            best_s: returns the step time of the best plan so far, in seconds.
        """
        self.is_exhausted = False
        self.priced: set[Values] = set()
        self._episodes, self.best_s = episodes, best_s
        self._root = _Node(None, -1)
        self._at = [self._root] * episodes.count

    def open_actions(self, number: int, legal: Ints) -> Ints:
        """The open actions of an episode; where none is open, those after which a plan has not been priced.

        Args:
            number: number of the episode.
            legal: actions that its mask allows, ascending.
        """
        node = self._at[number]
        if not node.actions:
            episodes = self._episodes.partial_plans.episodes
            offered = episodes.legal[number, : episodes.offered[number]]
            node.actions = legal.tolist()
            node.bounds = episodes.action_bounds[number, np.searchsorted(offered, legal), 0].tolist()
            node.is_closed = [False] * len(node.actions)
        best_s = self.best_s()
        found = [
            action
            for action, bound, closed in zip(node.actions, node.bounds, node.is_closed, strict=True)
            if not closed and bound < best_s
        ]
        if not found:
            self._close(node)
            found = [action for action, closed in zip(node.actions, node.is_closed, strict=True) if not closed]
        return np.array(found, dtype=np.int64) if found else legal

    def take(self, number: int, action: int) -> None:
        """Takes one of the legal actions of an episode."""
        node = self._at[number]
        place = node.actions.index(action)
        child = node.children.get(place)
        if child is None:
            child = node.children[place] = _Node(node, place)
        self._at[number] = child

    def finish(self, number: int) -> None:
        """Closes the complete and priced plan of an episode, which begins again."""
        self._close(self._at[number])
        self._at[number] = self._root

    def begin(self) -> None:
        """Begins all episodes again; what is closed stays closed."""
        self._at = [self._root] * self._episodes.count

    def _close(self, node: _Node) -> None:
        """Closes the action that leads to a node, and each earlier action after which no action is left open."""
        best_s = self.best_s()
        while node.parent is not None:
            parent = node.parent
            parent.is_closed[node.place] = True
            parent.children.pop(node.place, None)
            if parent.is_open(best_s):
                return
            node = parent
        self.is_exhausted = True
