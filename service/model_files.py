"""Files of models that the command line and the clients read and send on."""

from __future__ import annotations

from pathlib import Path

from automap.errors import ModelError
from ir import zoo
from ir.onnx.readers.limits import check_size
from ir.onnx.sandbox import SandboxLimits, needs_strip

MODEL_FORMS = "Give the path of an ONNX file or a layer profile, zoo:NAME or hf:FOLDER."
"""The forms in which commands take a model."""


def read_model_file(path: Path, parameters: tuple[str, ...]) -> bytes:
    """The bytes of a file; without its weights if they are in another file or make it too large to be read.

    Raises:
        ModelError: it cannot be read, or not without its weights, or it is a pipe that gives more than a file may have.
    """
    try:
        with path.open("rb") as file:
            if not needs_strip(file):
                # A pipe states no size, and may have no end.
                most = SandboxLimits().max_bytes
                data = file.read(most + 1)
                check_size(len(data), most)
                return data
    except OSError as fault:
        raise ModelError(
            f"cannot be read ({fault.strerror})", field="model", value=str(path), repair=_in_place(path)
        ) from None
    from ir.onnx.strip import strip_file

    return strip_file(path, parameters=parameters).data


def _in_place(path: Path) -> str:
    """What to give in place of a file that cannot be read: the known model or the folder that may be meant."""
    if (path / "config.json").is_file():
        return f"Write hf:{path} for a configuration of transformers."
    try:
        zoo.check_known(str(path))
    except ModelError:
        return MODEL_FORMS
    return f"Write zoo:{path} for the known model, or give the path of an ONNX file or a layer profile."
