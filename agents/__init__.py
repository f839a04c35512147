"""Who decides: every agent is a Searcher. `from agents import search` is the one call for users."""

from agents.searcher import Budget, Progress, SearchResult, search

__all__ = ["Budget", "Progress", "SearchResult", "search"]
