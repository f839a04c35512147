"""Records read from JSON: every number has a range, and the reader and the JSON Schema agree on it."""

import dataclasses
import typing

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from automap.cluster import Cluster, parse_cluster
from automap.gnn.plan import gnn_plan_schema
from automap.gnn.problem import problem_schema
from automap.hints import Hints
from automap.plan import Estimate, Plan, plan_schema
from automap.problem import Training
from automap.records import Length, Range, from_json, json_schema
from ir.errors import UserError

NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 0.0, 1.0, 0.5, 1.5, 2, 3, 4, 65536, 65537, 1 << 20, (1 << 20) + 1, 1e6, 1e-7, 2**63]),
    st.integers(-10, 10**7),
    st.floats(-2, 1e7, allow_nan=False),
    st.booleans(),
    st.none(),
)
TRAINING = {f.name for f in dataclasses.fields(Training)}


@given(st.dictionaries(st.sampled_from(sorted(TRAINING)), NUMBERS | st.sampled_from(["adam", "fp16", "row", ""])))
def test_reader_and_schema_agree(document):
    _agree(Training, {"global_batch": 8, **document})


@given(st.dictionaries(st.sampled_from(["dp", "tp", "pp", "cp", "ep", "zero", "num_micro_batches"]), NUMBERS), NUMBERS)
def test_reader_and_schema_agree_on_hints(fix, reserve):
    _agree(Hints, {"fix": fix, "memory_reserve_bytes": reserve})


@given(st.sampled_from(["memory_GiB", "memory_efficiency", "nics_per_node", "cache_MB", "sustained_clock"]), NUMBERS)
def test_reader_and_schema_agree_on_devices(name, value):
    document = parse_cluster("8xA100-80GB").to_json()
    document["devices"]["A100-80GB"][name] = value
    # Tuples are lists in JSON.
    document["devices"]["A100-80GB"]["aliases"] = []
    document["nodes"] = list(document["nodes"])
    _agree(Cluster, document)


def _agree(kind, document):
    valid = jsonschema.Draft202012Validator(json_schema(kind, title="x")).is_valid(document)
    try:
        from_json(kind, document, path="x")
    except UserError as fault:
        assert not valid, (document, str(fault))
        assert fault.field.startswith("x.") and fault.repair
    else:
        assert valid, document


@pytest.mark.parametrize("kind", [Cluster, Hints, Training, Plan])
def test_every_number_that_a_user_gives_states_its_range(kind):
    assert [name for name in _unranged(kind, set()) if not name.startswith(ESTIMATED)] == []


ESTIMATED = (
    "Estimate.",
    "DeviceMemory.",
    "SearchRecord.",
    "TrialRecord.",
    "Calibration.",
    "Yours.",
    "Change.",
    "TargetCost.",
    "Beside.",
)
"""Parts of a plan that AutoMAP writes, but reads only to show them again."""


def _unranged(kind, seen):
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if kind in seen:
            return
        seen.add(kind)
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            for inner in _unranged(hint, seen):
                yield f"{kind.__name__}.{name}" if inner == "" else inner
    elif origin is typing.Annotated:
        if not any(isinstance(limit, Range | Length) for limit in args[1:]):
            yield from _unranged(args[0], seen)
    elif origin is typing.Literal:
        return
    elif kind in (int, float):
        yield ""
    else:
        for arg in args:
            yield from _unranged(arg, seen)


def test_of_another_version_of_a_document_its_version_is_told():
    with pytest.raises(UserError) as fault:
        Plan.from_json({"schema": "automap.plan/2", "steps": []})
    assert (fault.value.field, fault.value.value) == ("plan.schema", "automap.plan/2")
    assert "automap.plan/1" in fault.value.repair


def test_a_misspelled_key_is_told_with_the_one_that_was_meant():
    for key, told in (
        ("presicion", "Did you mean precision? Remove it"),
        ("batch", "Did you mean batch_norm or global_batch? Remove it"),
        ("x" * 1_000_000, "Remove it"),
    ):
        with pytest.raises(UserError) as fault:
            from_json(Training, {"global_batch": 8, key: "bf16"}, path="training")
        assert fault.value.repair.startswith(told)


def test_values_are_told_as_json_spells_them():
    for value, told in ((None, "null"), (True, "true"), (3, "3"), ("", "nothing")):
        assert UserError("x", field="f", value=value, repair="r").value == told


def test_figures_of_a_plan_are_finite():
    with pytest.raises(UserError, match="finite"):
        from_json(Estimate, {"step_time_s": float("inf")}, path="plan.estimate")


@pytest.mark.parametrize("schema", [plan_schema, problem_schema, gnn_plan_schema])
def test_a_published_schema_says_what_every_key_means(schema):
    for name, record in schema()["$defs"].items():
        assert len(record["description"].split()) >= 3, f"write below {name} what it means"
        assert not record["description"].startswith(f"{name}("), f"{name} has no docstring"
        for key, found in record["properties"].items():
            assert len(found.get("description", "").split()) >= 3, f"write below {name}.{key} what it means"


def test_a_description_is_the_text_below_the_field():
    estimate = plan_schema()["$defs"]["Estimate"]["properties"]
    assert estimate["step_time_s"]["description"] == "Predicted time of one optimizer step, seconds."
