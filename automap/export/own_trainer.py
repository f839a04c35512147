"""Our own trainer: the plan document, which it reads as it is, and a training script to be filled in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources

from automap.errors import ModelError
from automap.export.configuration import Export, Note, Run
from ir import zoo

PLAN = "automap_plan.json"
SCRIPT = "train.py"
FILE = "model.onnx"
"""What `automap export-onnx` writes in docs/training.md."""


def write(run: Run) -> Export:
    """The files of a run."""
    try:
        zoo.check_known(run.plan.model.name)
        model = f"{zoo.PREFIX}{run.plan.model.name}"
    except ModelError:
        model = FILE
    text = resources.files("automap").joinpath("export", "own_script.py").read_text("utf-8")
    return Export(
        target=run.target.name,
        version=run.target.version,
        files={
            PLAN: json.dumps(run.plan.to_json(), indent=1) + "\n",
            SCRIPT: text.replace(f'MODEL = "{FILE}"', f"MODEL = {json.dumps(model)}"),
        },
        launch=f"{run.torchrun} {SCRIPT}",
        notes=tuple(_notes(model)),
    )


def _notes(model: str) -> Iterator[Note]:
    yield Note(about="everything", kept="exact", text="the trainer reads the plan itself")
    what = f"`build`, the network, and `batch`, its data, in {SCRIPT}"
    yield Note(about="network and data", kept="left to you", text=what)
    if model == FILE:
        what = f"`MODEL` in {SCRIPT}: what was searched, an ONNX file or hf:FOLDER"
        yield Note(about="model", kept="left to you", text=what)
