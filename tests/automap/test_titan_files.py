"""torchtitan's TOML of several versions, as people write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from automap.errors import PlanError
from automap.export.reading import read_configuration
from automap.export.stated import Stated

EXPERIMENTAL = """
[training]
batch_size = 4
seq_len = 128
data_parallel_degree = 2
tensor_parallel_degree = 4
enable_float8_linear = true
[experimental]
pipeline_parallel_degree = 2
pipeline_parallel_microbatches = 2
[activation_checkpoint]
mode = 'full'
"""


def read(tmp_path: Path, text: str) -> Stated:
    path = tmp_path / "a.toml"
    path.write_text(text)
    return read_configuration(path)


def test_degrees_of_old_versions_count(tmp_path: Path) -> None:
    found = read(tmp_path, EXPERIMENTAL)
    degrees = {"tp": 4, "pp": 2, "cp": 1, "ep": 1, "dp": 2, "micro_batch": 2, "zero": 1, "recompute": "full"}
    assert found.degrees == {**degrees, "sequence_parallel": True}
    # Nothing is accumulated: two replicas of 4 samples.
    assert found.training == {"global_batch": 8, "precision": "fp8", "trainer": "torchtitan"}
    assert found.ignored == ()


@pytest.mark.parametrize(
    ("text", "training", "degrees"),
    [
        (
            '[model]\nconverters = ["float8"]\n[float8]\nrecipe_name = "rowwise"',
            {"precision": "fp8", "scaling": "row"},
            {},
        ),
        ('[model]\nconverters = ["quantize.linear.mx"]', {"precision": "mxfp8"}, {}),
        (
            "[parallelism]\ntensor_parallel_degree = 2\nenable_async_tensor_parallel = true",
            {"async_tensor_parallel": 1},
            {},
        ),
        ('[optimizer]\nname = "AdamW"', {"optimizer": "adam"}, {}),
        ('[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "1"', {}, {"recompute": "full"}),
        (
            '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "Interleaved1F1B"',
            {},
            {"virtual": 2},
        ),
        ("[parallelism]\ndata_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 1", {}, {"dp": 4, "zero": 0}),
    ],
)
def test_what_changes_the_price_is_read(text: str, training: Any, degrees: Any, tmp_path: Path) -> None:
    found = read(tmp_path, text)
    assert training.items() <= found.training.items()
    assert degrees.items() <= found.degrees.items()


@pytest.mark.parametrize(
    ("text", "field", "repair"),
    [
        (
            '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "ZBVZeroBubble"',
            "parallelism.pipeline_parallel_schedule",
            "Interleaved1F1B",
        ),
        (
            "[parallelism]\ndata_parallel_replicate_degree = 2",
            "parallelism.data_parallel_replicate_degree",
            "Shard them",
        ),
        ('[activation_checkpoint]\nselective_ac_option = "2"', "activation_checkpoint.selective_ac_option", "full"),
        ('[training]\nmixed_precision_param = "float16"', "training.mixed_precision_param", "bfloat16"),
        (
            "[training]\ntensor_parallel_degree = 2\n[parallelism]\ntensor_parallel_degree = 4",
            "training.tensor_parallel_degree",
            "one",
        ),
        (
            "[experimental]\npipeline_parallel_split_points = ['layers.2']",
            "parallelism.pipeline_parallel_split_points",
            "module",
        ),
    ],
)
def test_what_has_no_price_is_refused(text: str, field: str, repair: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as fault:
        read(tmp_path, text)
    assert fault.value.field == f"from.{field}" and repair in fault.value.repair


def test_keys_that_are_not_read_are_named(tmp_path: Path) -> None:
    found = read(tmp_path, '[training]\nsteps = 10\ndtype = "bfloat16"\n[job]\ndump_folder = "x"\n[parallelism]\nx = 1')
    assert found.ignored == ("training.steps", "training.dtype", "job", "parallelism.x")
