"""Who decides: every agent is a Searcher. `from agents import search` is the one call for users."""

from agents.in_turn import search_in_turn
from agents.searcher import Budget, Progress, SearchResult, search

__all__ = ["Budget", "Progress", "SearchResult", "search", "search_in_turn"]
