"""The tree of decisions that a search has walked, and what of it can still hold a better plan."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from envs.decision import Episodes

Ints = npt.NDArray[np.int64]


class _Node:
    """A beginning of a plan, or a complete one, which has no actions."""

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
    far. No closed action is taken while another one is open: no plan is priced twice, and none that cannot win.

    Attributes:
        is_exhausted: whether no plan that is asked for can be faster than the best.
    """

    def __init__(self, episodes: Episodes, best_s: Callable[[], float]) -> None:
        """Begins with nothing explored.

        Args:
            episodes: of one problem, at their beginning.
            best_s: step time of the best plan so far, seconds.
        """
        self.is_exhausted = False
        self._episodes, self._best_s = episodes, best_s
        self._root = _Node(None, -1)
        self._at = [self._root] * episodes.count

    def open_actions(self, number: int, legal: Ints) -> Ints:
        """Actions of an episode that are worth taking; where none is open, those behind which some plan is not priced.

        Args:
            number: of the episode.
            legal: what its mask allows, ascending.
        """
        node = self._at[number]
        if not len(node.actions):
            episodes = self._episodes.partial_plans.episodes
            offered = episodes.legal[number, : episodes.offered[number]]
            node.actions = legal
            node.bounds = episodes.action_bounds[number, np.searchsorted(offered, legal), 0].copy()
            node.is_closed = np.zeros(len(legal), dtype=np.bool_)
        is_open = ~node.is_closed & (node.bounds < self._best_s())
        if not is_open.any():
            self._close(node)
            is_open = ~node.is_closed
        return node.actions[is_open] if is_open.any() else legal

    def take(self, number: int, action: int) -> None:
        """An episode goes on behind one of its legal actions."""
        node = self._at[number]
        behind = int(np.searchsorted(node.actions, action))
        self._at[number] = node.children.setdefault(behind, _Node(node, behind))

    def finish(self, number: int) -> None:
        """The plan of an episode is complete and priced; the episode begins anew."""
        self._close(self._at[number])
        self._at[number] = self._root

    def _close(self, node: _Node) -> None:
        while node.parent is not None:
            parent = node.parent
            parent.is_closed[node.behind] = True
            parent.children.pop(node.behind, None)
            if (~parent.is_closed & (parent.bounds < self._best_s())).any():
                return
            node = parent
        self.is_exhausted = True
