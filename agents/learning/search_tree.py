"""Search tree: the decisions that a search has taken so far, and which of them may still lead to a better plan."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from envs.decision import Episodes

Ints = npt.NDArray[np.int64]


class _Node:
    """A partial plan, or a complete one, which has no actions.

    Attributes:
        parent: the partial plan before the last decision; None at the root.
        behind: index of that decision among the actions of the parent.
        actions: [actions] legal actions, ascending.
        bounds: [actions] lower bound on the step time behind each action, in seconds.
        is_closed: [actions] whether nothing is left to explore behind each action.
        children: node behind each action that has been taken, by index.
    """

    __slots__ = ("actions", "behind", "bounds", "children", "is_closed", "parent")

    def __init__(self, parent: _Node | None, behind: int) -> None:
        self.parent, self.behind = parent, behind
        self.actions: Ints = np.empty(0, dtype=np.int64)
        self.bounds = np.empty(0)
        self.is_closed = np.empty(0, dtype=np.bool_)
        self.children: dict[int, _Node] = {}


class SearchTree:
    """What is left to explore.

    An action is closed where every plan behind it has been priced or is, by its bound, no faster than the best plan so
    far. No closed action is taken while another one is open: no plan is priced twice, and none that cannot be the best.

    Attributes:
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
        self._episodes, self.best_s = episodes, best_s
        self._root = _Node(None, -1)
        self._at = [self._root] * episodes.count

    def open_actions(self, number: int, legal: Ints) -> Ints:
        """Open actions of an episode; where none is open, those behind which some plan is not priced.

        Args:
            number: number of the episode.
            legal: actions that its mask allows, ascending.
        """
        node = self._at[number]
        if not len(node.actions):
            episodes = self._episodes.partial_plans.episodes
            offered = episodes.legal[number, : episodes.offered[number]]
            node.actions = legal
            node.bounds = episodes.action_bounds[number, np.searchsorted(offered, legal), 0].copy()
            node.is_closed = np.zeros(len(legal), dtype=np.bool_)
        is_open = ~node.is_closed & (node.bounds < self.best_s())
        if not is_open.any():
            self._close(node)
            is_open = ~node.is_closed
        return node.actions[is_open] if is_open.any() else legal

    def take(self, number: int, action: int) -> None:
        """Goes on behind one of the legal actions of an episode."""
        node = self._at[number]
        behind = int(np.searchsorted(node.actions, action))
        self._at[number] = node.children.setdefault(behind, _Node(node, behind))

    def finish(self, number: int) -> None:
        """Closes the complete and priced plan of an episode, which begins again."""
        self._close(self._at[number])
        self._at[number] = self._root

    def begin(self) -> None:
        """Begins all episodes anew; what is closed stays closed."""
        self._at = [self._root] * self._episodes.count

    def _close(self, node: _Node) -> None:
        """Closes the action that leads to a node, and the ones before it behind which no action is open any more."""
        while node.parent is not None:
            parent = node.parent
            parent.is_closed[node.behind] = True
            parent.children.pop(node.behind, None)
            if (~parent.is_closed & (parent.bounds < self.best_s())).any():
                return
            node = parent
        self.is_exhausted = True
