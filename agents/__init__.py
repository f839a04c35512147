"""Agents: the searchers that decide plans (`agents.searcher`). Users call `from agents import search_offer`."""

from agents.portfolio.in_turn import search_in_turn
from agents.portfolio.offer import search_offer
from agents.searcher import Budget, Progress, SearchResult, search

__all__ = ["Budget", "Progress", "SearchResult", "search", "search_in_turn", "search_offer"]
