"""API keys: who may do what, until when.

A key is `amk_<id>_<secret>_<checksum>`: the prefix lets scanners find keys that were published by mistake, the checksum
refuses typing errors without a look into the store. Of the secret, 190 random bits, only the SHA-256 is kept, so that
whoever reads the store cannot use it; such a secret needs no slow hash. Knows nothing of HTTP. Units: seconds since
1970.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import re
import secrets
import string
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import redis

from automap.errors import UserError
from automap.records import from_json, to_json

Scope = Literal["read", "submit", "admin"]
"""What a key allows: to read what its tenant has; to upload, submit, cancel and delete single things; to delete
everything of the tenant. None includes another."""
SCOPES: tuple[Scope, ...] = get_args(Scope)

_KEYS, _USED = "automap:keys", "automap:keys:used"
_LETTERS = string.ascii_letters + string.digits
_SECRET_LETTERS = 32
_FORM = re.compile(rf"amk_([a-z0-9]{{12}})_([A-Za-z0-9]{{{_SECRET_LETTERS}}})_([0-9a-f]{{8}})")
_TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_USED_EVERY_S = 60.0
"""Least seconds between two notes of when a key was used (assumed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """A key without its secret."""

    id: str
    tenant: str
    scopes: tuple[Scope, ...]
    name: str
    """For people: who has it, and what for."""
    sha256: str
    """Of the whole key."""
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None


class BadKey(Exception):
    """The key is not accepted; the message says why, to one who holds it.

    Attributes:
        key: the record of one that was accepted before; None = it is none, or unknown.
    """

    def __init__(self, why: str, key: Key | None = None) -> None:
        super().__init__(why)
        self.key = key


class Keys:
    """All keys of a Redis.

    Args:
        client: connection to it.
        clock: seconds since 1970.
    """

    def __init__(self, client: redis.Redis, *, clock: Callable[[], float] = time.time) -> None:
        self._redis: Any = client
        self._clock = clock
        self._note_again: dict[str, float] = {}

    def create(
        self, tenant: str, scopes: Sequence[Scope], *, name: str = "", lasts_s: float | None = None
    ) -> tuple[str, Key]:
        """Makes a key.

        Args:
            tenant: whose models and jobs it opens.
            scopes: what it allows.
            name: for people.
            lasts_s: seconds after which it expires; None = never.

        Returns:
            The key, which cannot be had again, and its record.

        Raises:
            UserError: the tenant's name.
        """
        if not _TENANT.fullmatch(tenant):
            repair = "Give at most 40 small letters, digits and hyphens, as in vision-team."
            raise UserError("not a name of a tenant", field="tenant", value=tenant, repair=repair)
        key_id = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(12))
        body = f"amk_{key_id}_" + "".join(secrets.choice(_LETTERS) for _ in range(_SECRET_LETTERS))
        text, now = f"{body}_{_checksum(body)}", self._clock()
        key = Key(
            id=key_id,
            tenant=tenant,
            scopes=tuple(scope for scope in SCOPES if scope in scopes),
            name=name,
            sha256=hashlib.sha256(text.encode()).hexdigest(),
            created_at=now,
            expires_at=None if lasts_s is None else now + lasts_s,
        )
        self._write(key)
        return text, key

    def checked(self, text: str, found: bytes | None) -> Key:
        """The record of a key that may be used now.

        Args:
            text: the key.
            found: what is at its place, see `place_of`.

        Raises:
            BadKey: it may not.
        """
        key = None if found is None else _key(found)
        if key is None or not hmac.compare_digest(key.sha256, hashlib.sha256(text.encode()).hexdigest()):
            raise BadKey("The key is unknown.")
        if key.revoked_at is not None:
            raise BadKey("The key has been revoked.", key)
        if key.expires_at is not None and key.expires_at <= self._clock():
            raise BadKey("The key has expired.", key)
        return key

    def is_noted(self, key: Key) -> bool:
        """Whether it was noted within the last minute that the key was used."""
        return self._clock() < self._note_again.get(key.id, 0.0)

    def note(self, key: Key) -> None:
        """Notes that a key was used."""
        now = self._clock()
        self._note_again[key.id] = now + _USED_EVERY_S
        with contextlib.suppress(redis.ResponseError):  # a full or read only Redis: who only looks may still look
            self._redis.hset(_USED, key.id, repr(now))

    def revoke(self, key_id: str) -> Key:
        """Revokes a key: it is refused from the next request on.

        Raises:
            UserError: there is no such key.
        """
        found = self._redis.hget(_KEYS, key_id)
        if found is None:
            raise UserError("no such key", field="id", value=key_id, repair="See `automap keys list`.")
        key = _key(found)
        if key.revoked_at is None:
            key = replace(key, revoked_at=self._clock())
            self._write(key)
        return key

    def all(self) -> list[tuple[Key, float | None]]:
        """Every key and when it was used last, to the minute; the oldest first."""
        used = self._redis.hgetall(_USED)
        found = map(_key, self._redis.hvals(_KEYS))
        return [
            (key, float(used[key.id.encode()]) if key.id.encode() in used else None)
            for key in sorted(found, key=lambda key: (key.created_at, key.id))
        ]

    def any_usable(self) -> bool:
        """Whether some key may be used now."""
        now = self._clock()
        return any(key.revoked_at is None and (key.expires_at or now + 1) > now for key, _ in self.all())

    def _write(self, key: Key) -> None:
        self._redis.hset(_KEYS, key.id, json.dumps(to_json(key)))


def place_of(text: str) -> tuple[str, str]:
    """Where the record of a key is: key and field of a hash.

    Raises:
        BadKey: it is none.
    """
    match = _FORM.fullmatch(text)
    if match is None or match[3] != _checksum(text[: match.start(3) - 1]):
        raise BadKey("This is not a key of AutoMAP: a part of it may be missing.")
    return _KEYS, match[1]


@functools.lru_cache(maxsize=1024)
def _key(text: bytes) -> Key:
    return from_json(Key, json.loads(text), path="key")


def _checksum(body: str) -> str:
    return f"{zlib.crc32(body.encode()):08x}"
