"""Bodies of `POST /v1/jobs` with something wrong in them: valid ones of every sort, and seeded changes of those.

Bodies are bytes, since what is wrong may be something that no parsed document can hold: a key twice, NaN, a number of
400 digits, half of a surrogate pair.
"""

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from agents import Budget, search
from automap.cluster import parse_cluster
from automap.fitted_curves import fitted
from automap.problem import Problem
from ir import zoo

TODAY = {"file": "today.sh", "text": "--tensor-model-parallel-size 2 --micro-batch-size 2 --fp16"}
MODEL = "gpt:layers=2,hidden=64,heads=4,seq_len=16,vocab_size=128"
BATCH = 8


class Raw(str):
    """Text that stands in a body as it is."""


class Twice(dict):
    """An object whose first key stands in it twice."""


NUMBERS = [
    Raw(text)
    for text in (
        "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + 400 * "0", "1" * 5000, "1e308", "1.7e308", "-1e308",
        "1e-308", "5e-324", "0", "-0.0", "-1", "1", "0.5", "1.5", "2", "7", "1e6", "1e18", "9007199254740993",
        "2147483647", "2147483648", "4294967296", "9223372036854775807", "9223372036854775808",
        "18446744073709551616", "-9223372036854775809", "1e-12",
    )
]  # fmt: skip
TEXTS = [
    Raw(text)
    for text in (
        r'"\ud800"', r'"\udc00\ud800"', r'"a\udfffb"', r'"\u0000"', '""', '"x"', '"' + 5000 * "x" + '"', '"../../x"',
        '"fp32"', '"bf16"', '"A100"', '"ethernet-25"', '"S(999999999999999999999)"', '"**"', '"*"', '"0-99999999999"',
        r'"\u202e\u0007"', '"NaN"', '"1e999"', '"S(-1)"', '"0-3"', '"dp"',
    )
]  # fmt: skip
OTHERS = [
    Raw(text) for text in ("null", "true", "false", "[]", "{}", "[[]]", "[null]", "[0]", '{"x": 1}', r'{"\ud800": 1}')
]
DEEP = [Raw("[" * depth + "]" * depth) for depth in (100, 1000, 100_000)]
KEYS = [Raw(text) for text in (r'"\ud800"', r'"\u0000"', '""', '"fp32"', '"64"', '"-1"', '"x"', '"' + 3000 * "k" + '"')]


def valid(seed: int = 0) -> list[dict[str, Any]]:
    """Job bodies that are accepted: each sort of cluster, training, hints and baseline."""
    plain = parse_cluster("2x2xV100-16GB@25Gbit").to_json()
    mixed = parse_cluster("2xV100-32GB+2xP100").to_json()
    matrix = parse_cluster("4xA100").to_json()
    matrix["bandwidth_GBps"] = [[0.0 if i == j else 100.0 + i + j for j in range(4)] for i in range(4)]
    adam = {"global_batch": BATCH, "precision": "fp16", "optimizer": "adam", "trainer": "megatron-core"}
    sync = {"global_batch": BATCH, "sync_modes": ["synchronous", "local_sgd", "dasgd"], "sync_period": 3}
    hints = {
        "costs": {"h.*.mlp.c_fc/MatMul": {"forward_s": 1e-5, "flops": 1e6, "bytes": 1e5}},
        "measured_blocks": [{"scope": "h.*", "tp": 1, "samples": 2, "forward_s": 1e-4, "backward_s": 2e-4}],
        "constraints": [
            {"scope": "wte", "replicate": True, "stage": 0},
            {"scope": "h.*.mlp.c_fc", "sharding": {"tp": "S(2)"}, "recompute": True},
        ],
        "fix": {"dp": 2, "tp": 2, "pp": 1, "num_micro_batches": 1, "zero": 1, "recompute": "full", "schedule": "1f1b"},
        "memory_reserve_bytes": 1e9,
    }
    some = {"global_batch": BATCH}
    fused = {"global_batch": BATCH, "loss": None, "async_tensor_parallel": True}
    trials = {"top_k": 2, "steps": 2, "time_limit_s": 30.0}
    about = {"name": "x", "dims": {}, "parameters": [], "batch_dims": {}}
    rest = {"searchers": ["mcmc", "elimination"], "budget": 40, "seed": seed}
    bodies = [
        {"cluster": plain, "training": adam, "hints": {"baseline": _plan(plain, adam)}, **rest},
        {"cluster": mixed, "training": sync, "trials": trials, **rest},
        {"cluster": matrix, "training": some, "hints": {"baseline": _plan(matrix, some)}, **rest},
        {"cluster": _measured(), "training": fused, **rest},
        {"cluster": plain, "training": adam, "hints": hints, **rest, "budget": "1s"},
        {"cluster": "8xV100-16GB", "training": adam, **about, **rest},
        {"cluster": plain, "training": adam, "hints": {"baseline": TODAY}, **rest},
    ]
    return [{"zoo": MODEL, **body} for body in bodies]


def mutated(bases: Sequence[dict[str, Any]], count: int, seed: int = 0) -> Iterator[bytes]:
    """`count` bodies, each a valid one with one to three changes."""
    draw = random.Random(seed)
    for number in range(count):
        body = copy.deepcopy(bases[number % len(bases)])
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            _change(body, draw)
        yield written(body).encode()


def written(value: Any) -> str:
    """A document as JSON, and what is `Raw` in it as it is."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        pairs = [f"{k if isinstance(k, Raw) else json.dumps(k)}: {written(v)}" for k, v in value.items()]
        return "{" + ", ".join([*pairs, *(pairs[:1] if isinstance(value, Twice) else ())]) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value)


def _change(body: dict[str, Any], draw: random.Random) -> None:
    places = list(_places(body))
    # First a key of the body is drawn, then a place inside of it, so that large values are changed no more often.
    top = draw.choice(list(body))
    inside = [place for place in places if place[2][0] == top]
    holder, key, _ = draw.choice(inside or places)
    was = holder[key]
    way = draw.random()
    if way < 0.1:
        del holder[key]
    elif way < 0.15 and isinstance(holder, dict):
        holder[draw.choice(KEYS)] = holder.pop(key)
    elif way < 0.2 and isinstance(was, dict) and was:
        holder[key] = Twice(was)
    elif way < 0.23:
        holder[key] = draw.choice(DEEP)
    elif way < 0.27 and isinstance(holder, list):
        holder.insert(draw.randrange(len(holder) + 1), copy.deepcopy(was))
    elif way < 0.32:
        other, name, _ = draw.choice(places)
        holder[key] = copy.deepcopy(other[name]) if not isinstance(other[name], dict | list) else draw.choice(OTHERS)
    else:
        like = NUMBERS if isinstance(was, int | float) and not isinstance(was, bool) else TEXTS
        holder[key] = draw.choice(draw.choice((like, like, like, NUMBERS, TEXTS, OTHERS)))


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any, tuple[Any, ...]]]:
    """Every (holder, key, path) of a document."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key, (*path, key)
        if isinstance(value[key], dict | list):
            yield from _places(value[key], (*path, key))


def _plan(cluster: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    problem = Problem.build(zoo.build(MODEL), parse_cluster(cluster), training)
    # Read back, so that it has lists where the record has tuples.
    document: dict[str, Any] = json.loads(
        json.dumps(search(problem, Budget(evaluations=20), searcher="mcmc").plan.to_json())
    )
    return document


def _measured() -> dict[str, Any]:
    """A cluster as `automap profile` writes it: curves and constants of its own."""
    document = parse_cluster("4xA100").to_json()
    (device,), (*links,) = document["devices"].values(), document["links"].values()
    attention = next(iter(fitted("attention")["curves"].values()))
    device["kernels"] = {"gemm": {name: _gemm() for name in device["peak_TFLOPs"]}, "attention": attention}
    curve = {"latency_us": 10.0, "latency_growth": 0.1, "efficiency": 0.8, "small_group": 0.1, "ramp": 1.0}
    intra = next(link for link in links if link["scope"] == "intra")
    intra["collectives"] = {"all_reduce": {**curve, "rows": 9, "cross_validated": {"median_error": 0.1}}}
    names = ("kernel_us", "host_us_per_operator", "step_overhead_ms", "reserved_GiB", "micro_batch_ms")
    document["constants"] = {**dict.fromkeys(names, 0.5), "overlap_exponent": 1.0, "misaligned": 1.5}
    return json.loads(json.dumps(document))


def _gemm() -> dict[str, Any]:
    curve: dict[str, Any] = next(iter(next(iter(fitted("gemm")["curves"].values())).values()))
    return curve
