"""Reads trainers' configurations as stated strategies: the inverse of the exports.

Read are bash scripts and YAML maps of Megatron-LM's arguments, torchtitan's TOML, DeepSpeed's JSON and accelerate's
YAML, both with the `TrainingArguments` in the same folder, and our own pytorch.json. If a script or YAML names
DeepSpeed's JSON, that is read if it is in the same folder. Settings that do not affect the plan are listed as not read.
A setting that affects it but that a stated strategy cannot express is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from automap.documents import read_document
from automap.errors import PlanError
from automap.export import training_arguments
from automap.export.accelerate_reading import read_accelerate
from automap.export.deepspeed_reading import read_deepspeed
from automap.export.megatron_reading import read_map, read_script
from automap.export.onnx_devices import SCHEMA as ONNX_SCHEMA
from automap.export.pytorch import SCHEMA as PYTORCH_SCHEMA
from automap.export.stated import (
    Beside,
    Stated,
    check_shards,
    layers_of_stages,
    nothing_beside,
    recomputes,
    refuse,
    section,
)
from automap.export.torchtitan_reading import read_torchtitan
from automap.targets import targets


def read_configuration(path: Path) -> Stated:
    """The strategy of a configuration file.

    Raises:
        PlanError: it cannot be read, or as in `read_text`.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else "not UTF-8"
        repair = "Name one of its files, such as megatron.sh." if path.is_dir() else "Name a readable file."
        raise PlanError(f"cannot be read ({reason})", field="from", value=str(path), repair=repair) from None
    return read_text(path.name, text, arguments_beside(path), files_beside(path))


def arguments_beside(path: Path) -> str:
    """The text of the `TrainingArguments` beside a configuration, empty where there are none."""
    return files_beside(path)(training_arguments.FILE) or ""


def files_beside(path: Path) -> Beside:
    """The files in the folder of a configuration, by the last part of the name that the configuration gives them."""

    def read(name: str) -> str | None:
        try:
            return path.with_name(name.rpartition("/")[2]).read_text("utf-8")
        except (OSError, ValueError):  # a name of no file, or a file of no text
            return None

    return read


def read_text(name: str, text: str, arguments: str = "", beside: Beside = nothing_beside) -> Stated:
    """The strategy of the text of a configuration.

    Args:
        name: name of the file, whose ending says whose configuration it is.
        text: its text.
        arguments: text of the `TrainingArguments` beside it, which DeepSpeed's and accelerate's say a part in; empty
            for none.
        beside: further files beside it, of which those are read that it names.

    Raises:
        PlanError: it says something that is not priced; names the key.
    """
    reader = _READERS.get(Path(name).suffix)
    if reader is None:
        repair = f"Name a file that ends in {', '.join(_READERS)}."
        if name.endswith(".py"):
            repair = "Code is not read: of torchtitan 0.3, give the torchtitan.toml that is exported beside it."
        raise PlanError("not a kind of configuration that can be read", field="from", value=name, repair=repair)
    found = reader(text, beside)
    if arguments and found.target in ("deepspeed", "accelerate"):
        training_arguments.complete(found, name, arguments)
    found.training.setdefault("trainer", targets()[found.target].trainer)
    return found


def _json(text: str, beside: Beside) -> Stated:
    document = read_document(text, field="from", error=PlanError)
    if not isinstance(document, dict):
        raise PlanError(
            "is not a JSON object", field="from", value=text[:20], repair="Give DeepSpeed's JSON, or pytorch.json."
        )
    schema = str(document.get("schema", ""))
    if schema.startswith("automap.plan/"):
        raise refuse("schema", schema, "is a plan of AutoMAP", "Give it by --plan.")
    if schema.startswith("automap.export/"):
        raise refuse("schema", schema, "is the report of an export", "Give the configuration beside it.")
    if schema == ONNX_SCHEMA:
        return _onnx(document)
    if document.get("schema") != PYTORCH_SCHEMA:
        return read_deepspeed(document)
    try:
        return _pytorch(document)
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        raise refuse("json", str(fault), "is not a pytorch.json that was exported", "Export it again.") from None


def _onnx(document: Mapping[str, Any]) -> Stated:
    said = section(section(document, "plan"), "training")
    training = {name: value for name, value in said.items() if name not in ("target", "memory_confidence")}
    return Stated(target="onnx", training=training, document=document)


def _pytorch(document: Mapping[str, Any]) -> Stated:
    mesh, layers, stages = section(document, "mesh"), document["layers"], document["stages"]
    sizes = dict(zip(mesh["dim_names"], mesh["shape"], strict=True))
    is_outer = mesh["dim_names"].index("tensor") < mesh["dim_names"].index("shard")
    if is_outer and sizes["tensor"] > 1 and sizes["replicate"] * sizes["shard"] > 1:
        raise refuse("mesh.dim_names", mesh["dim_names"], "'tensor' is in front of 'shard'", "Put it last.")
    check_shards("mesh.shape", sizes["replicate"], sizes["shard"])
    again = recomputes("recompute", document["recompute"], layers)
    degrees = {"tp": sizes["tensor"], "pp": sizes["pipe"], "zero": document["zero"], "sequence_parallel": False}
    degrees["dp"] = sizes["replicate"] * sizes["shard"]
    degrees |= {"micro_batch": document["micro_batch"], "recompute": again}
    if sizes["pipe"] > 1:
        degrees |= {"virtual": len(stages) // sizes["pipe"], "layers": layers_of_stages(layers, stages)}
        if document["schedule"] != "interleaved":
            degrees["schedule"] = document["schedule"]
    training = {name: document[name] for name in ("global_batch", "precision", "optimizer") if name in document}
    return Stated(target="pytorch", training=training, degrees=degrees)


def _yaml(text: str, beside: Beside) -> Stated:
    document = _maps(text)
    if "MODEL_ARGS" in document:
        given = section(document, "MODEL_ARGS")
        flags = {name.removeprefix("--"): value for name, value in given.items() if value is not False}
        said = {name: None if value is True else str(value) for name, value in flags.items()}
        return read_map(said, section(document, "ENV_VARS"))
    return read_accelerate(document, beside)


def _maps(text: str) -> dict[str, Any]:
    """YAML of at most two levels of keys with plain values: all that these configurations use.

    Raises:
        PlanError: anything else, with the number of the line.
    """
    found: dict[str, Any] = {}
    inside: dict[str, Any] = found
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.split(" #")[0].rstrip()
        if not bare or bare.lstrip().startswith("#") or bare == "---":
            continue
        name, colon, value = bare.strip().partition(":")
        is_nested = bare.startswith(" ")
        if not colon or name.startswith(("-  ", "- ")) or (value and not value.startswith(" ")):
            raise refuse(f"line {number}", bare, "is not read", "Write keys with plain values, in at most two levels.")
        if not is_nested:
            inside = found
        if not value and not is_nested:
            found[name] = inside = {}
        else:
            inside[name] = _plain(value.strip())
    return found


def _plain(text: str) -> Any:
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in ("{}", "[]", "null", "~"):
        return None
    return text.strip("'\"")


_READERS: Mapping[str, Callable[[str, Beside], Stated]] = {
    **dict.fromkeys((".sh", ".bash", ".sbatch", ".slurm"), read_script),
    ".toml": lambda text, beside: read_torchtitan(text),
    ".json": _json,
    ".yaml": _yaml,
    ".yml": _yaml,
}
"""Ending of a file -> its reader."""
