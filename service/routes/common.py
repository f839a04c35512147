"""What all routes share."""

from __future__ import annotations

from typing import cast

from fastapi import Request

from service.settings import Settings
from service.store import Store


def settings_of(request: Request) -> Settings:
    """The service's settings."""
    return cast("Settings", request.app.state.settings)


def store_of(request: Request) -> Store:
    """The service's store."""
    return cast("Store", request.app.state.store)
