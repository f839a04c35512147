from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import redis

from service.http.reader import Reader


def test_each_gets_its_own_answer_and_a_fault_is_its_own(client: redis.Redis) -> None:
    client.hset("h", mapping={str(number): str(number) for number in range(500)})
    client.set("text", "no hash")

    async def ask() -> list[Any]:
        with contextlib.closing(Reader(client)) as reader:
            reads = [reader.hget("h", str(number)) for number in range(500)]
            others = [reader.hget("text", "x"), reader.hmget("h", ["7", "none"]), reader.hget("none", "x")]
            return await asyncio.gather(*reads, *others, return_exceptions=True)

    *reads, fault, several, nothing = asyncio.run(ask())
    assert reads == [str(number).encode() for number in range(500)]
    assert isinstance(fault, redis.ResponseError)
    assert (several, nothing) == ([b"7", None], None)


def test_one_who_left_takes_nobody_along(client: redis.Redis) -> None:
    client.hset("h", "x", "1")

    async def ask() -> bytes | None:
        with contextlib.closing(Reader(client)) as reader:
            left = asyncio.ensure_future(reader.hget("h", "x"))
            stays = asyncio.ensure_future(reader.hget("h", "x"))
            await asyncio.sleep(0)
            left.cancel()
            return await stays

    assert asyncio.run(ask()) == b"1"


def test_without_redis_all_are_told(client: redis.Redis) -> None:
    away = redis.Redis(port=1)

    async def ask() -> list[Any]:
        with contextlib.closing(Reader(away)) as reader:
            return await asyncio.gather(*(reader.hget("h", "x") for _ in range(300)), return_exceptions=True)

    assert {type(found) for found in asyncio.run(ask())} == {redis.ConnectionError}


def test_reads_go_together(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    executions = 0
    execute = redis.client.Pipeline.execute

    def counted(self: Any, *given: Any, **rest: Any) -> Any:
        nonlocal executions
        executions += 1
        return execute(self, *given, **rest)

    monkeypatch.setattr(redis.client.Pipeline, "execute", counted)

    async def ask() -> None:
        with contextlib.closing(Reader(client)) as reader:
            await asyncio.gather(*(reader.hget("h", "x") for _ in range(256)))

    asyncio.run(ask())
    assert executions <= 128
