"""Clients of the service's Redis.

Knows nothing of what is kept there. Units: seconds.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from contextlib import suppress

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.retry import Retry

from automap.errors import UserError

LONGEST_PAUSE_S = 1.0
"""Longest time between two attempts of a patient client, so that work goes on soon after Redis is back."""


def connect(url: str, *, patient: bool = False) -> redis.Redis:
    """A client for `url`.

    Args:
        url: address of a Redis.
        patient: whether commands wait for a Redis that is away, however long; else they fail at once.

    Raises:
        UserError: not such a URL.
    """
    more = {"retry": Retry(ExponentialBackoff(cap=LONGEST_PAUSE_S, base=0.05), retries=-1)} if patient else {}
    try:
        return redis.Redis.from_url(url, socket_connect_timeout=5, **more)
    except ValueError:
        repair = "Write it as in redis://host:6379/0."
        # Without what is before the host: it may be a password.
        shown = re.sub(r"//[^/]*@", "//...@", url)
        raise UserError("not a Redis URL", field="redis_url", value=shown, repair=repair) from None


def impatient(client: redis.Redis) -> redis.Redis:
    """A client of the same Redis whose commands fail at once where it is away."""
    pool = client.connection_pool
    given = {**pool.connection_kwargs, "retry": Retry(NoBackoff(), 0)}
    return redis.Redis(connection_pool=redis.ConnectionPool(connection_class=pool.connection_class, **given))


def paced(action: Callable[[], object], *, every_s: float) -> Callable[[], None]:
    """`action`, done at most every `every_s` seconds; without Redis it is left out."""
    last = -math.inf

    def act() -> None:
        nonlocal last
        if time.monotonic() - last >= every_s:
            last = time.monotonic()
            with suppress(redis.ConnectionError, redis.TimeoutError):
                action()

    return act
