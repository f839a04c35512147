"""The record of models, in Redis: files by the sha256 of their bytes, and what was imported from them.

Every key carries its tenant, so that no tenant can name what is another's, nor learn that another has the same file.
Units: bytes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import redis

from service.jobs.connection import left_out_while_away
from service.jobs.records import Model, dumps

DEFAULT_TENANT = "default"
"""Whose everything is where no keys are needed."""
TENANTS = "automap:tenants"
"""Names of all tenants that have stored anything."""
GRAPH_TTL_S = 3600
"""Seconds that imported models are kept; they can always be made again from the file."""
MOST_GRAPHS = 32
"""Imported models that a tenant has at most: each set of dims makes another one of the same file (assumed)."""


class StoreFull(Exception):
    """The limit on what a tenant may store is reached."""


class ModelStore:
    """Models of one tenant in one Redis.

    Args:
        client: connection to it.
        tenant: whose models.
        clock: seconds since 1970.
    """

    def __init__(
        self, client: redis.Redis, tenant: str = DEFAULT_TENANT, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.client = client
        self.tenant = tenant
        self._redis: Any = client  # redis-py types every reply as bytes or text; this connection never decodes
        self._clock = clock
        self._at = f"automap:t:{tenant}:"

    def tenants(self) -> list[str]:
        """All tenants that have stored anything."""
        return sorted(name.decode() for name in self._redis.smembers(TENANTS))

    def stored_bytes(self) -> int:
        """Bytes of model files, requests and plans."""
        return sum(int(size) for table in ("models", "sizes") for size in self._redis.hvals(f"{self._at}{table}"))

    def add_model(self, data: bytes, *, name: str, summary: Mapping[str, Any], capacity: int) -> Model:
        """Stores a model file; the same bytes have the same id and are stored once, with the name they had first.

        Raises:
            StoreFull: the tenant would store more than `capacity` bytes.
        """
        model_id = hashlib.sha256(data).hexdigest()
        known = self.model(model_id)
        if known is not None:
            # What is said about its dims may differ.
            return replace(known, summary={**summary, "name": known.name})
        fields = {"name": name, "summary": dumps(summary), "data": data}

        def change(pipe: Any) -> None:
            if self.stored_bytes() + len(data) > capacity:
                raise StoreFull
            pipe.multi()
            pipe.sadd(TENANTS, self.tenant)
            pipe.hset(f"{self._at}models", model_id, str(len(data)))
            pipe.hset(self.model_key(model_id), mapping=fields)

        # Others may come at once, which together would pass the limit.
        self._redis.transaction(change, f"{self._at}models")
        return Model(id=model_id, name=name, num_bytes=len(data), summary=summary)

    def model_key(self, model_id: str) -> str:
        """Where a model is."""
        return f"{self._at}model:{model_id}"

    def model(self, model_id: str) -> Model | None:
        """The record of a model, or None."""
        name, summary = self._redis.hmget(self.model_key(model_id), ["name", "summary"])
        size = self._redis.hget(f"{self._at}models", model_id)
        if name is None or summary is None or size is None:
            return None
        return Model(id=model_id, name=name.decode(), num_bytes=int(size), summary=json.loads(summary))

    def models(self) -> list[Model]:
        """All models, by name."""
        ids = [name.decode() for name in self._redis.hkeys(f"{self._at}models")]
        return sorted(filter(None, map(self.model, ids)), key=lambda model: (model.name, model.id))

    def model_bytes(self, model_id: str) -> bytes | None:
        """The bytes of a model's file, or None."""
        return cast("bytes | None", self._redis.hget(self.model_key(model_id), "data"))

    def delete_model(self, model_id: str, *, admit: Callable[[], object] = lambda: None) -> bool:
        """Removes a model; returns whether there was one. Imports of it go when their time is over.

        Args:
            model_id: id of the model.
            admit: raises where a job needs the model. No job of the tenant comes between this look and the removal.
        """

        drop = functools.partial(self._drop_models, [model_id])
        return bool(self._removed(drop, f"{self._at}active", admit=admit)[0])

    def _drop_models(self, ids: Sequence[str], pipe: Any) -> None:
        """Adds the removal of models to a pipeline."""
        pipe.unlink(*map(self.model_key, ids))
        pipe.hdel(f"{self._at}models", *ids)

    def _removed(
        self, remove: Callable[[Any], object], *watched: bytes | str, admit: Callable[[], object] = lambda: None
    ) -> list[Any]:
        """What the commands of a removal answer, which are one transaction.

        Args:
            remove: adds the commands to a pipeline; done again if a watched key has changed meanwhile.
            watched: keys that it looks at.
            admit: raises where nothing may be removed; done before `remove`.
        """

        def change(pipe: Any) -> None:
            admit()
            pipe.multi()
            remove(pipe)

        try:
            return list(self._redis.transaction(change, *watched))
        except redis.exceptions.OutOfMemoryError:
            # Redis begins no transaction while its memory is full; then nothing can come meanwhile either.
            with self._redis.pipeline(transaction=False) as pipe:
                remove(pipe)
                return list(pipe.execute())

    def add_graph(self, key: str, data: bytes, summary: Mapping[str, Any]) -> None:
        """Keeps an imported model for a while, and with it the latest ones of the tenant, where Redis takes writes."""
        with self._redis.pipeline() as pipe, left_out_while_away():
            pipe.hset(f"{self._at}import:{key}", mapping={"graph": data, "summary": dumps(summary)})
            pipe.expire(f"{self._at}import:{key}", GRAPH_TTL_S)
            pipe.lrem(f"{self._at}imports", 0, key)
            pipe.lpush(f"{self._at}imports", key)
            pipe.lrange(f"{self._at}imports", MOST_GRAPHS, -1)
            pipe.ltrim(f"{self._at}imports", 0, MOST_GRAPHS - 1)
            old = pipe.execute()[4]
            if old:
                self._redis.delete(*(f"{self._at}import:{name.decode()}" for name in old))

    def graph(self, key: str) -> bytes | None:
        """An imported model, or None."""
        return cast("bytes | None", self._redis.hget(f"{self._at}import:{key}", "graph"))

    def graph_summary(self, key: str) -> dict[str, Any] | None:
        """The summary of an imported model, or None."""
        found = self._redis.hget(f"{self._at}import:{key}", "summary")
        return None if found is None else json.loads(found)

    def forget_graphs(self) -> None:
        """Drops all imported models: another version of the importer may read them differently."""
        for key in self._redis.scan_iter("automap:t:*:import:*"):
            self._redis.delete(key)
