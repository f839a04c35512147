"""The notebook of the examples runs from the model to the files, and shows what it finds."""

from __future__ import annotations

import os
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "two_trainers.ipynb"


@pytest.mark.slow
def test_the_notebook_goes_from_a_model_to_files_for_two_trainers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(found)
    # What a run leaves behind is not kept in the project.
    assert not any(cell.get("outputs") for cell in found.cells)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    nbclient.NotebookClient(found, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in found.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    for part in ("megatron.sh megatron.yaml export.json", "torchtitan_plan.py", "--tensor-model-parallel-size"):
        assert part in printed
    shown = [output.data for output in outputs if output.output_type == "execute_result"]
    assert [text["text/plain"].partition("(")[0] for text in shown] == ["Graph", "SearchResult", "Plan"]
    assert ["<svg" in html["text/html"] for html in shown] == [False, True, True]
