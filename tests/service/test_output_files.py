"""Outputs are written whole or not at all."""

import resource
from pathlib import Path

import pytest

from automap.errors import PlanError
from service.output_files import write_output


def test_what_cannot_be_written_leaves_what_stood_there(tmp_path: Path) -> None:
    there = tmp_path / "table.json"
    there.write_text("before")
    there.chmod(0o640)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(PlanError) as caught:
            write_output(there, "a text that is longer than a file may be")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.field, caught.value.value, caught.value.repair) == ("output", str(there), "Name another file.")
    assert there.read_text() == "before"
    write_output(there, b"after")
    assert there.read_text() == "after" and there.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [there]


def test_a_device_that_is_full_is_named() -> None:
    with pytest.raises(PlanError, match="/dev/full"):
        write_output(Path("/dev/full"), "text")
