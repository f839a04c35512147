"""Inputs of an ONNX file: their roles, their sizes, and their batch dims."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from ir.build import GraphBuilder
from ir.errors import ModelError, ask_for_batch, refuse
from ir.graph import Tensor
from ir.onnx.options import ReadOptions
from ir.onnx.readers.nodes import Declared, Source
from ir.onnx.readers.recurrent_batch import recurrent_places

Dim = int | str


def add_inputs(builder: GraphBuilder, source: Source, options: ReadOptions) -> None:
    """Adds the inputs of a file that are read, at one sample, and sets the exported batch size of `builder`.

    Raises:
        ModelError: the shape or a size of an input is missing, or an option about an input is invalid.
    """
    dims, parameters = options.get("dims") or {}, options.get("parameters") or ()
    _check_names(source, dims)
    _check_globs(source, parameters)
    marked = {"PARAMETER": "parameter", "USER_INPUT": "input", "": "input"}
    roles = {}
    for name, declared in source.inputs.items():
        is_named = any(fnmatchcase(name, pattern) for pattern in parameters)
        # Other marks (CONSTANT_TENSOR) are for values created during tracing, which are neither data nor trained.
        is_stated = declared.is_read_as_weight and name in (options.get("batch_dims") or {})
        roles[name] = "parameter" if is_named else "input" if is_stated else marked.get(declared.kind, "buffer")
    used = {n for node in source.nodes for n in node.inputs}
    read = [(n, d) for n, d in source.inputs.items() if n in used or n in source.outputs]
    weights = [n for n, d in read if d.is_read_as_weight and roles[n] == "parameter"]
    if weights:
        others = f" and {len(weights) - 3} more" if len(weights) > 3 else ""
        why = "taken as parameters, since the file stores none and they are read as weights"
        builder.warnings.append(f"{', '.join(weights[:3])}{others}: {why}")
    data = {n: d for n, d in read if roles[n] == "input"}
    places = _batch_places(builder, data, source, options)
    _check_bound(read, places, dims)
    for name, declared in read:
        if declared.shape is None:
            repair = "Write its shape into the file (graph.input), with a symbolic first dim for the batch."
            raise refuse("an input has no declared shape", name, repair)
        place = places.get(name)
        shape = [
            builder.export_batch if i == place and isinstance(size, str) else _bound(name, i, size, dims)
            for i, size in enumerate(declared.shape)
        ]
        if place is not None:
            shape[place] //= builder.export_batch
        builder.add_tensor(
            Tensor(name=name, shape=tuple(shape), dtype=declared.dtype, role=roles[name], batch_dim=place)  # type: ignore[arg-type]
        )


def _check_names(source: Source, dims: Mapping[str, int]) -> None:
    """Checks that the file has all symbolic dims for which sizes are given."""
    shapes = [d.shape or () for d in (*source.inputs.values(), *source.outputs.values(), *source.declared.values())]
    names = dict.fromkeys(size for shape in shapes for size in shape if isinstance(size, str)) if dims else {}
    for name in dims:
        if name not in names:
            repair = "Leave it out: all sizes stand in the file."
            if names:
                repair = f"Its symbolic dims are {', '.join(list(names)[:8])}."
            raise ModelError(
                "no symbolic dim of the model has this name", field=f"dims.{name}", value=name, repair=repair
            )


def _check_globs(source: Source, parameters: Sequence[str]) -> None:
    """Checks that every glob of parameters matches a name in the file."""
    names = [*source.inputs, *source.stored]
    for pattern in parameters:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError(
                "no input and no stored tensor of the model has a name that this glob matches",
                field="hints.parameters",
                value=pattern,
                repair=f"Its names begin with {', '.join(names[:8])}." if names else "Leave it out.",
            )


def _check_bound(
    inputs: Sequence[tuple[str, Declared]], places: Mapping[str, int | None], dims: Mapping[str, int]
) -> None:
    """Checks that all symbolic dims of inputs have sizes; the error lists all that do not."""
    unbound: dict[str, tuple[str, int]] = {}
    for name, declared in inputs:
        for index, size in enumerate(declared.shape or ()):
            if isinstance(size, str) and index != places.get(name) and size not in dims:
                unbound.setdefault(size, (name, index))
    if not unbound:
        return
    size, (name, index) = next(iter(unbound.items()))
    others = f", as are {', '.join(list(unbound)[1:9])}" if len(unbound) > 1 else ""
    options = " ".join(f"--dim {shlex.quote(f'{each}=128')}" for each in list(unbound)[:8])
    request = ", ".join(f'"{each}": 128' for each in list(unbound)[:8])
    batch = ""
    if index != places.get(name, 0):
        batch = f' If it is the batch, say so: `--batch-dim {name}={index}`, or `batch_dims`: {{"{name}": {index}}}.'
    raise ModelError(
        f"dim {index} of input {name} is symbolic and has no size{others}",
        field=f"dims.{size}",
        value="unbound",
        repair=f"State sizes: `{options}`, or in a request the field `dims`: {{{request}}}.{batch}",
    )


def _bound(name: str, index: int, size: Dim, dims: Mapping[str, int]) -> int:
    """The size of a dim, looked up where it is symbolic."""
    size = dims[size] if isinstance(size, str) else size
    if size <= 0:
        raise refuse(f"dim {index} of input {name} has no size", size, "Export with positive sizes.")
    return size


BATCH_NAMES = re.compile(r"(?i)n|b|bs|bsz|.*batch.*")
"""Names of symbolic dims that can only mean the batch, in exporters' and people's use (assumed)."""
LENGTH_NAMES = re.compile(
    r"(?i)t|time(_?steps?)?|length|(src|tgt|max|source|target)_?len(gth)?"
    r"|((src|tgt|max|source|target|num)_?)?(seq|sequence|tokens?)(_?len(gth)?)?"
)
"""Names of symbolic dims that can only mean the length of a sequence, in the same use (assumed)."""


def _batch_place(shape: Sequence[Dim] | None, dims: Mapping[str, int]) -> int:
    """The dim that is called the batch, where the leading one has another name or a size; else the leading one."""
    named = [i for i, size in enumerate(shape or ()) if isinstance(size, str) and BATCH_NAMES.fullmatch(size)]
    return named[0] if len(named) == 1 and shape is not None and shape[named[0]] not in dims else 0


def _batch_sizes(
    data: Mapping[str, Declared],
    places: Mapping[str, int | None],
    dims: Mapping[str, int],
    batch_dims: Mapping[str, int | None],
) -> dict[str, Dim]:
    """The declared size of the batch dim of each input: a number or the name of a symbolic dim.

    Inputs whose leading dim is named as a length are left out.

    Raises:
        ModelError: no dim of any input can be the batch.
    """
    found: dict[str, Dim] = {}
    lengths: dict[str, str] = {}
    for name, declared in data.items():
        place = places[name]
        if place is None or declared.shape is None:
            continue
        size = declared.shape[place]
        if isinstance(size, str) and name not in batch_dims and LENGTH_NAMES.fullmatch(size):
            lengths[name] = size
        else:
            found[name] = dims.get(size, size) if isinstance(size, str) else size
    if lengths and not found:
        name, size = next(iter(lengths.items()))
        raise ModelError(
            f"the leading dim of input {name} is called {size}, which is not a batch",
            field=f"batch_dims.{name}",
            value="not stated",
            repair=ask_for_batch(name, len(data[name].shape or ())),
        )
    return found


def _static_batch(sizes: Mapping[str, Dim], outputs: Mapping[str, Declared]) -> int:
    """The batch size if all sizes are numbers: the leading size of most outputs, or the first of several such sizes."""
    begins = [declared.shape[0] for declared in outputs.values() if declared.shape]
    return max((int(size) for size in sizes.values()), key=begins.count, default=1)


def _batch_places(
    builder: GraphBuilder, data: Mapping[str, Declared], source: Source, options: ReadOptions
) -> dict[str, int | None]:
    """The batch dim of each data input; also sets the exported batch size of `builder` (1 if it is symbolic)."""
    dims, batch_dims = options.get("dims") or {}, options.get("batch_dims") or {}
    for name in batch_dims:
        if name not in data:
            repair = f"Data inputs are: {', '.join(data) or 'none'}."
            raise ModelError("no data input has this name", field=f"batch_dims.{name}", value=name, repair=repair)
    recurrent = recurrent_places(source)
    places: dict[str, int | None] = {}
    for name, declared in data.items():
        rank = len(declared.shape or ())
        usual = _batch_place(declared.shape, dims) if rank else None
        defined, why = recurrent.get(name, (usual, ""))
        place = batch_dims.get(name, defined)
        if name not in batch_dims and defined != usual:
            builder.warnings.append(f"{name}: dim {place} is the batch, {why}")
        if place is not None and not 0 <= place < rank:
            repair = f"Give a dim from 0 to {rank - 1}, or null."
            raise ModelError(
                "the batch dim is outside the input's rank", field=f"batch_dims.{name}", value=place, repair=repair
            )
        places[name] = place
    sizes = _batch_sizes(data, places, dims, batch_dims)
    symbolic = {n for n, s in sizes.items() if isinstance(s, str)}
    # One input determines the batch size: one with a symbolic leading dim, else the first with an explicit batch dim.
    first = next((n for n in batch_dims if n in sizes and n not in symbolic), None)
    batch = 1 if symbolic else int(sizes[first]) if first else _static_batch(sizes, source.outputs)
    for name, place in list(places.items()):
        if place is None or name in batch_dims:
            continue
        agrees = name in sizes and (name in symbolic if symbolic else sizes[name] == batch)
        if not agrees:
            size = (data[name].shape or ())[place]
            places[name] = None
            builder.warnings.append(f"{name}: leading dim {size} is not the batch, taken as the same for all samples")
    if batch <= 0:
        raise refuse("the batch dim has no size", batch, "Export at a batch of 1 or more.")
    builder.export_batch = batch
    return places
