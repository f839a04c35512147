"""Clients of the service's Redis.

Independent of what is kept there. Units: seconds.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from automap.errors import UserError

T = TypeVar("T")
LONGEST_PAUSE_S = 1.0
"""Longest time between two attempts of a patient client, so that work goes on soon after Redis is back."""
ANSWER_S = 5.0
"""Longest time that Redis may take to answer, or to take a connection; beyond it, it is away."""
AWAY = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.OutOfMemoryError)
"""What is raised while Redis is away, or its memory is full; see also `passes`."""
_REFUSED_FOR_NOW = re.compile(r"(?:^|caused error: )(?:NOREPLICAS|MISCONF) ")
"""Beginning of the answer of a Redis that takes no writes while it has too few copies (`min-replicas-to-write`), or
while it cannot write its own file; redis-py has no classes for them. In a transaction it follows other words."""
_CUT = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError, ssl.SSLWantReadError)
"""Errors of TLS that say nothing of keys and certificates."""
_WITH_SENTINELS = re.compile(r"(rediss?)-sentinel://(?:(.*)@)?([^@/?#]+)(/\d*)?(\?[^#]*)?#(.+)")
"""As Lettuce has it: https://redis.github.io/lettuce/user-guide/connecting-redis/ ("URI syntax")."""
PROBE = "automap:probe"
"""A key that is written to find out whether Redis can be written."""
_PORT = 6379
"""Where a Redis is whose address names no port."""
_SENTINEL_PORT = 26379


class _Patient(redis.ConnectionPool):
    """Waits for a connection as its commands wait for an answer; redis-py's gives up where a connection is cut off
    twice before it has brought a command."""

    def get_connection(self, *args: Any, **options: Any) -> Any:
        retry: Retry = self.connection_kwargs["retry"]
        get = super().get_connection
        return retry.call_with_retry(lambda: get(*args, **options), lambda error: None)


class _PatientWithSentinels(_Patient, SentinelConnectionPool):
    """A patient pool of connections to the Redis that sentinels name."""


def connect(url: str, *, patient: bool = False) -> redis.Redis:
    """A client for `url`.

    Args:
        url: address of a Redis, as redis-py reads it (`redis://`, `rediss://` for TLS, `unix://`); or of sentinels that
            know it: `redis-sentinel://[user:password@]host[:port],…[/db][?options]#name`, `rediss-sentinel://` with TLS
            for Redis and sentinels. The options `sentinel_username` and `sentinel_password` are for the sentinels.
        patient: whether commands wait for a Redis that is away, however long; else they fail at once.

    Raises:
        UserError: not such a URL.
    """
    retry = Retry(ExponentialBackoff(cap=LONGEST_PAUSE_S, base=0.05), retries=-1) if patient else Retry(NoBackoff(), 0)
    # No driver_info: redis-py would look its own version up on disk for every connection, of which a job makes two.
    given = {"socket_connect_timeout": ANSWER_S, "socket_timeout": ANSWER_S, "retry": retry, "driver_info": None}
    try:
        match = _WITH_SENTINELS.fullmatch(url)
        if match is None:
            client = redis.Redis.from_pool((_Patient if patient else redis.ConnectionPool).from_url(url, **given))
        else:
            client = _found_by_sentinels(match, given, _PatientWithSentinels if patient else SentinelConnectionPool)
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # which refuses options that it does not know
    except (ValueError, TypeError, redis.RedisError):
        repair = "Write it as in redis://host:6379/0; docs/deploy.md tells of TLS and sentinels."
        # Without what is before the host: it may be a password.
        shown = re.sub(r"//[^/]*@", "//...@", url).partition("?")[0]
        raise UserError("not a Redis URL", field="redis_url", value=shown, repair=repair) from None
    return client


def _found_by_sentinels(
    match: re.Match[str], given: dict[str, Any], pool_class: type[SentinelConnectionPool]
) -> redis.Redis:
    scheme, user, hosts, database, options, name = match.groups(default="")
    # Host and port are what the sentinels say.
    read: dict[str, Any] = dict(parse_url(f"{scheme}://{user}@sentinels{database}{options}"))  # type: ignore[no-untyped-call]
    del read["host"]
    read.pop("connection_class", None)
    own = {key: read.pop(f"sentinel_{key}") for key in ("username", "password") if f"sentinel_{key}" in read}
    encrypted = {key: value for key, value in read.items() if key.startswith("ssl_")}
    encrypted |= {"ssl": True} if scheme == "rediss" else {}
    places = [host.rpartition(":") if ":" in host else (host, "", str(_SENTINEL_PORT)) for host in hosts.split(",")]
    # One sentinel after another is asked, each once.
    asked = {**given, **encrypted, **own, "retry": Retry(NoBackoff(), 0)}
    known = Sentinel([(host, int(port)) for host, _, port in places], sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
    client: redis.Redis = known.master_for(name, connection_pool_class=pool_class, **{**given, **read, **encrypted})  # type: ignore[no-untyped-call]
    return client


def check(url: str) -> None:
    """Looks whether a Redis takes commands.

    Raises:
        UserError: no waiting helps. It answers and refuses, as with a wrong password or a user without rights; its
            certificate is refused; a file of certificates cannot be read; or it speaks TLS and the URL does not, or the
            other way round.
        redis.RedisError: it is away, or takes no writes for now (`passes`).
    """
    with connect(url) as client:
        try:
            _check_files(client)
            client.ping()
            _check_rights(client)
        except redis.BusyLoadingError:
            raise
        except (redis.AuthenticationError, redis.ResponseError) as fault:
            if isinstance(fault, redis.ResponseError) and passes(fault):
                raise
            repair = "Put name, password and database into AUTOMAP_REDIS_URL, as in redis://name:password@host:6379/0."
            raise UserError(f"Redis refuses ({fault})", field="redis_url", value="...", repair=repair) from None
        except (redis.ConnectionError, redis.TimeoutError) as fault:
            # A connection that ends in the middle of its beginning is one of a Redis that goes away.
            if isinstance(fault.__context__, _CUT):
                raise
            _check_scheme(client)
            if not isinstance(fault.__context__, ssl.SSLError):
                raise
            repair = "Name the authority of its certificate by ssl_ca_certs in AUTOMAP_REDIS_URL (docs/deploy.md)."
            told = f"no TLS with this Redis ({fault})"
            raise UserError(told, field="redis_url", value="...", repair=repair) from None


def _check_scheme(client: redis.Redis) -> None:
    """Refuses the scheme of an address whose Redis does not answer, where it answers with the other scheme.

    A Redis without TLS takes the beginning of TLS for half a command, and waits for the rest. It is asked without
    name and password, which nobody may read on the way.

    Raises:
        UserError: names both schemes.
    """
    pool = client.connection_pool
    given = pool.connection_kwargs
    if "host" not in given:  # a socket, or sentinels
        return
    encrypted = issubclass(pool.connection_class, redis.SSLConnection)
    asked: dict[str, Any] = {"host": given["host"], "port": given.get("port", _PORT), "driver_info": None}
    asked |= {"socket_timeout": ANSWER_S, "socket_connect_timeout": ANSWER_S, "retry": Retry(NoBackoff(), 0)}
    asked |= {} if encrypted else {"ssl": True, "ssl_cert_reqs": "none", "ssl_check_hostname": False}
    try:
        with redis.Redis(**asked) as other:
            other.ping()
    except (redis.AuthenticationError, redis.ResponseError):
        pass
    except redis.RedisError:
        return
    wrong, right = ("rediss", "redis") if encrypted else ("redis", "rediss")
    message = "this Redis speaks no TLS here" if encrypted else "this Redis speaks only TLS here"
    more = ", or the port that is `tls-port` in the configuration of Redis" if encrypted else ""
    repair = f"Write {right}:// in AUTOMAP_REDIS_URL{more} (docs/deploy.md)."
    value = f"{wrong}://{asked['host']}:{asked['port']}"
    raise UserError(message, field="redis_url", value=value, repair=repair) from None


def _check_rights(client: redis.Redis) -> None:
    """Refuses a user of Redis that may not do what the service does, of which a part is tried: what it does later would
    fail again and again.

    Raises:
        UserError: names what the user may not do.
    """
    with client.pipeline(transaction=False) as pipe:
        pipe.set(PROBE, "", ex=60)
        pipe.hget(f"{PROBE}:hash", "field")
        pipe.zcard(f"{PROBE}:set")
        pipe.smembers("rq:workers")
        answers = pipe.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, redis.exceptions.NoPermissionError):
            repair = "Give its user the rights that docker/redis/users.sh gives: ~automap:* ~rq:* +@all -@dangerous."
            raise UserError(f"Redis refuses ({answer})", field="redis_url", value="...", repair=repair)


def _check_files(client: redis.Redis) -> None:
    """Refuses files of keys and certificates that cannot be read: with them a Redis would seem to be away."""
    given = client.connection_pool.connection_kwargs
    for option in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        path = given.get(option)
        if path is not None and not os.access(path, os.R_OK):
            repair = f"Name a file by {option} in AUTOMAP_REDIS_URL that the service may read."
            raise UserError(f"the file of {option} cannot be read", field="redis_url", value=path, repair=repair)


def impatient(client: redis.Redis) -> redis.Redis:
    """A client of the same Redis whose commands fail at once where it is away; to be closed by its user."""
    pool = client.connection_pool
    given = {**pool.connection_kwargs, "retry": Retry(NoBackoff(), 0), "connection_class": pool.connection_class}
    if isinstance(pool, SentinelConnectionPool):
        given.pop("connection_pool")
        return redis.Redis.from_pool(SentinelConnectionPool(pool.service_name, pool.sentinel_manager, **given))  # type: ignore[no-untyped-call]
    return redis.Redis.from_pool(redis.ConnectionPool(**given))


def passes(fault: redis.RedisError) -> bool:
    """Whether waiting helps: Redis is away, its memory or disk is full, it has lost its copies, or is read only."""
    if isinstance(fault, (*AWAY, redis.exceptions.ReadOnlyError)):
        return True
    return isinstance(fault, redis.ResponseError) and _REFUSED_FOR_NOW.search(str(fault)) is not None


@contextlib.contextmanager
def left_out_while_away() -> Iterator[None]:
    """A context that ends at a command which Redis does not take for now (`passes`); what follows it is left out."""
    try:
        yield
    except redis.RedisError as fault:
        if not passes(fault):
            raise


def patiently(write: Callable[[], T], *, pause_s: float = LONGEST_PAUSE_S) -> T:
    """What a write returns, done again while Redis takes no writes; a patient client waits while Redis is away."""
    while True:
        try:
            return write()
        except redis.ResponseError as fault:
            if not passes(fault):
                raise
            time.sleep(pause_s)


def paced(action: Callable[[], object], *, every_s: float) -> Callable[[], None]:
    """`action`, done at most every `every_s` seconds; while nothing can be written it is left out."""
    last = -math.inf

    def act() -> None:
        nonlocal last
        if time.monotonic() - last >= every_s:
            last = time.monotonic()
            with left_out_while_away():
                action()

    return act
