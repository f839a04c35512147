"""Graph to and from JSON. Defaults are left out; the round trip is exact."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from math import isfinite
from typing import Any, cast

from ir.factors import Factor, FactorRule, InternalCollective, Passing
from ir.graph import Amount, Graph, Operator, Tensor, TensorRole, once_per_graph

SCHEMA = "automap.graph/1"
FLAGS = ("scope", "is_view", "is_constant", "opset")
"""Fields of an operator that are written where they are not empty."""
STATED = ("measured_forward_s", "measured_backward_s", "stated_bytes")
"""Fields of an operator that are written where they are known."""


def graph_to_bytes(graph: Graph) -> bytes:
    """The graph as canonical JSON: equal graphs give equal bytes."""
    return json.dumps(graph_to_json(graph), separators=(",", ":"), sort_keys=True).encode()


def graph_from_bytes(data: bytes) -> Graph:
    """Inverse of `graph_to_bytes`.

    Raises:
        ValueError: `data` is not such a document.
    """
    return graph_from_json(json.loads(data))


@once_per_graph
def graph_digest(graph: Graph) -> str:
    """The sha256 of a graph's canonical bytes, in hexadecimal."""
    return hashlib.sha256(graph_to_bytes(graph)).hexdigest()


_ZERO = Amount()


def _amount(amount: Amount) -> list[float]:
    return [amount.fixed, amount.per_sample]


def _number(value: Any) -> Any:
    """An attribute as JSON, which has no infinities; tuples become lists, which are read back as tuples."""
    if isinstance(value, float) and not isfinite(value):
        return {"float": str(value)}
    if isinstance(value, tuple):
        return [_number(v) for v in value]
    return value


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return float(value["float"])
    if isinstance(value, list):
        return tuple(_value(v) for v in value)
    return value


def _factor(factor: Factor) -> list[Any]:
    """A factor as [name, size, marks, collective]; marks are `b` for the batch, `+` summed, `!` fixed."""
    marks = ("b" if factor.is_batch else "") + ("+" if factor.summed else "") + ("!" if factor.fixed else "")
    c = factor.collective
    return [factor.name, factor.size, marks] + (
        [[c.name, c.kind, list(c.forward_bytes), list(c.backward_bytes)]] if c else []
    )


def _rule(rule: FactorRule) -> dict[str, Any]:
    return {
        "factors": [_factor(f) for f in rule.factors],
        "inputs": [[list(d) for d in dims] for dims in rule.inputs],
        "outputs": [[list(d) for d in dims] for dims in rule.outputs],
        "passing": rule.passing,
        **({"linear": list(rule.linear)} if rule.linear else {}),
    }


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """The graph as plain JSON values.

    Equal rules are written once (`rules`), operators refer to them by number. Fields with their default are left out.
    """
    rules: dict[FactorRule, int] = {}
    numbers: dict[int, int] = {}  # of the very objects, which most operators share: hashing a rule takes long
    operators = []
    for op in graph.operators:
        number = numbers.get(id(op.rule))
        if number is None:
            number = numbers[id(op.rule)] = rules.setdefault(op.rule, len(rules))
        entry: dict[str, Any] = {
            "name": op.name,
            "kind": op.kind,
            "inputs": list(op.inputs),
            "outputs": list(op.outputs),
            "rule": number,
            "traffic": list(op.traffic),
        }
        if not (op.forward_flops == op.backward_flops == _ZERO):
            entry["flops"] = [_amount(op.forward_flops), _amount(op.backward_flops)]
        if op.saved:
            entry["saved"] = list(op.saved)
        for key in FLAGS:
            if value := getattr(op, key):
                entry[key] = value
        for key in STATED:
            if (value := getattr(op, key)) is not None:
                entry[key] = value
        if op.annotations:
            entry["annotations"] = [list(pair) for pair in op.annotations]
        if op.attributes:
            entry["attributes"] = [[k, _number(v)] for k, v in op.attributes]
        operators.append(entry)
    return {
        "schema": SCHEMA,
        "name": graph.name,
        "sha256": graph.sha256,
        "tensors": [[t.name, list(t.shape), t.dtype, t.role, t.batch_dim] for t in graph.tensors.values()],
        **({"frozen": [t.name for t in graph.tensors.values() if t.frozen]} if graph.has_frozen else {}),
        "rules": [_rule(r) for r in rules],
        "operators": operators,
        "outputs": list(graph.outputs),
        "warnings": list(graph.warnings),
        "pieces": {k: list(v) for k, v in graph.pieces.items()},
    }


def _read_factor(data: list[Any]) -> Factor:
    name, size, marks, *rest = data
    collective = None
    if rest:
        label, kind, forward, backward = rest[0]
        collective = InternalCollective(
            name=label, kind=kind, forward_bytes=(forward[0], forward[1]), backward_bytes=(backward[0], backward[1])
        )
    return Factor(
        name=name, size=size, is_batch="b" in marks, summed="+" in marks, fixed="!" in marks, collective=collective
    )


def _read_rule(data: Mapping[str, Any]) -> FactorRule:
    return FactorRule(
        factors=tuple(_read_factor(f) for f in data["factors"]),
        inputs=tuple(tuple(tuple(d) for d in dims) for dims in data["inputs"]),
        outputs=tuple(tuple(tuple(d) for d in dims) for dims in data["outputs"]),
        passing=cast(Passing, data["passing"]),
        linear=tuple(data.get("linear", ())),
    )


def _read_amount(data: list[float]) -> Amount:
    return Amount(fixed=data[0], per_sample=data[1])


def graph_from_json(data: Mapping[str, Any]) -> Graph:
    """Inverse of `graph_to_json`.

    Raises:
        ValueError: `data` is not such a document.
    """
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
        raise ValueError(f"not a {SCHEMA} document")
    try:
        return _read_graph(data)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"not a valid {SCHEMA} document: {error!r}") from error


def _read_graph(data: Mapping[str, Any]) -> Graph:
    rules = [_read_rule(r) for r in data["rules"]]
    operators = []
    for entry in data["operators"]:
        forward, backward = map(_read_amount, entry["flops"]) if "flops" in entry else (_ZERO, _ZERO)
        operators.append(
            Operator(
                name=entry["name"],
                kind=entry["kind"],
                inputs=tuple(entry["inputs"]),
                outputs=tuple(entry["outputs"]),
                rule=rules[entry["rule"]],
                forward_flops=forward,
                backward_flops=backward,
                traffic=(entry["traffic"][0], entry["traffic"][1]),
                saved=tuple(entry.get("saved", ())),
                attributes=tuple((k, _value(v)) for k, v in entry.get("attributes", ())),
                annotations=tuple((k, int(v)) for k, v in entry.get("annotations", ())),
                **{key: entry[key] for key in (*FLAGS, *STATED) if key in entry},
            )
        )
    frozen = frozenset(data.get("frozen", ()))
    tensors = {
        name: Tensor(
            name=name,
            shape=tuple(shape),
            dtype=dtype,
            role=cast(TensorRole, role),
            batch_dim=batch_dim,
            frozen=name in frozen,
        )
        for name, shape, dtype, role, batch_dim in data["tensors"]
    }
    return Graph(
        name=data["name"],
        operators=tuple(operators),
        tensors=tensors,
        outputs=tuple(data["outputs"]),
        warnings=tuple(data["warnings"]),
        sha256=data["sha256"],
        pieces={k: (v[0], v[1], v[2], v[3]) for k, v in data["pieces"].items()},
    )
