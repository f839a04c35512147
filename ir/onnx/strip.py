"""Strips the weights from a model file, and the information about the machine on which it was written.

The stripped file imports to an equal graph. Dropped: the data of every tensor whose value the importer does not read
(parameters, buffers, constants of more than `MAX_VALUE_ELEMENTS` elements), references to external data, training
graphs, doc strings, the producer (except PyTorch, whose quirks the importer knows), stack traces and all metadata
except module names and roles. Kept: names, attributes, and small constants (shapes, scales, masks).

Weights are removed from the bytes before protobuf parses them, so that stripping takes little memory whatever the size
of the file. External data is read only when a file on disk is stripped, and only for tensors that may be small
constants.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import onnx
from onnx import external_data_helper

from ir.build import MAX_VALUE_ELEMENTS
from ir.errors import refuse
from ir.onnx.read import read_model
from ir.onnx.readers.annotations import ANNOTATION_KEYS
from ir.onnx.readers.guard import check, message, not_onnx
from ir.onnx.readers.limits import Limits
from ir.onnx.readers.nodes import (
    BAND_KEY,
    COMPUTED_KEY,
    CONTENT_KEY,
    DATA_FIELDS,
    DTYPES,
    FILLED_KEY,
    FOLDED_KEY,
    FROZEN_KEY,
    KIND_KEY,
    PYTORCH,
    QUANTISED_KEY,
    RANK_KEY,
    REPEATS_KEY,
    ROWS_KEY,
    SCOPE_KEY,
    SIGNATURE_KEY,
    SMALL_INTEGERS,
    TURNED_KEY,
    UNREAD_KEY,
    Node,
    has_data,
)
from ir.onnx.readers.roles import roles_without_metadata, stored_role
from ir.onnx.readers.stated_costs import COST_KEYS
from ir.onnx.rewrites.computed_tables import MAX_ELEMENTS, computed_tables
from ir.onnx.rewrites.equal_weights import rounded_table, tables_and_heads
from ir.onnx.rewrites.exporter_quirks import content, is_filled
from ir.onnx.rewrites.folded_products import folded_sources, rank_of
from ir.onnx.rewrites.quantisation import dequantised
from ir.onnx.rewrites.repeated_samples import periods
from ir.onnx.rewrites.stored_bands import band_of, stated
from ir.onnx.rewrites.stored_rows import READERS, rows_of

KEPT_METADATA = frozenset(
    {
        KIND_KEY,
        SCOPE_KEY,
        FOLDED_KEY,
        SIGNATURE_KEY,
        FILLED_KEY,
        CONTENT_KEY,
        TURNED_KEY,
        COMPUTED_KEY,
        REPEATS_KEY,
        BAND_KEY,
        ROWS_KEY,
        RANK_KEY,
        UNREAD_KEY,
        QUANTISED_KEY,
        FROZEN_KEY,
    }
    | {*COST_KEYS, *ANNOTATION_KEYS}
)
MAX_COMPARED_BYTES = 1 << 30
"""Bytes of the largest file whose weights are compared with each other before they are dropped (assumed). If an
exporter does not mark parameters, a tied head can be recognised only by its numbers; if it does, the same holds for
constants that the exporter's optimiser computed from parameters."""
FLOATS = frozenset({1, 10, 11, 16})
"""`TensorProto.DataType` of weights."""
WEIGHTS = FLOATS | {number for number, dtype in DTYPES.items() if dtype in SMALL_INTEGERS}
"""`TensorProto.DataType` of weights, including quantised ones."""
LARGE_BYTES = 16 * MAX_VALUE_ELEMENTS
"""Bytes of the largest constant whose value the importer reads."""

# Message type -> field number -> message type, along every path to a tensor (numbers: onnx.proto).
_PATHS: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
_DATA_NUMBERS = frozenset({4, 5, 6, 7, 9, 10, 11})
"""Fields of a tensor that hold its data."""
_DROPPED: Mapping[str, frozenset[int]] = {"model": frozenset({20})}
"""Message type -> numbers of the fields that are dropped (training_info)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stripped:
    """The bytes of a stripped file, and a summary of what was dropped."""

    data: bytes
    bytes_before: int
    """Bytes of the original file, without external data."""
    num_dropped: int
    """Number of tensors whose data was dropped."""
    num_kept: int
    """Number of small constants whose values remain."""


def strip_file(path: Path, *, parameters: Sequence[str] = ()) -> Stripped:
    """Strips a file of any size.

    Args:
        path: path of the ONNX file.
        parameters: globs that match the names of weights, for files whose exporter did not mark them.

    Raises:
        ModelError: the file cannot be read, or is no ONNX model that the importer supports.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = memoryview(mapped)
            try:
                return strip(view, parameters=parameters, folder=path.parent)
            finally:
                view.release()
    except (OSError, ValueError) as fault:  # an empty file cannot be mapped
        raise refuse(
            "the file cannot be read",
            f"{path}: {getattr(fault, 'strerror', None) or fault}",
            "Give the path of an ONNX file.",
        ) from None


def strip(data: memoryview | bytes, *, parameters: Sequence[str] = (), folder: Path | None = None) -> Stripped:
    """Strips the bytes of a file; see `strip_file`.

    Args:
        data: the bytes.
        parameters: as for `strip_file`.
        folder: folder from which small tensors in external data are read; None: no other file is opened.
    """
    is_compared = len(data) <= MAX_COMPARED_BYTES
    is_marked = re.search(re.escape(KIND_KEY.encode()), data) is not None
    try:
        read = bytes(data) if is_compared else b"".join(_without_large(memoryview(data), "model"))
    except IndexError:
        raise not_onnx(data) from None
    model = message(read)
    faults = {} if folder is None else _read_small(model, folder)
    outside = {t.name: faults.get(t.name, "") for t in model.graph.initializer if _is_external(t)}
    _compare(model, is_marked=is_marked)
    _clean(model)
    check(model, Limits())
    dropped, kept = _drop_weights(model, outside, parameters)
    stripped: bytes = model.SerializeToString(deterministic=True)
    return Stripped(data=stripped, bytes_before=len(data), num_dropped=dropped, num_kept=kept)


# Bytes


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _without_large(view: memoryview, kind: str) -> Iterator[bytes | memoryview]:
    """The parts of a message without large tensor data; the parts that are kept are not copied."""
    paths, at, copied = _PATHS[kind], 0, 0
    while at < len(view):
        start = at
        key, at = _varint(view, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            _, at = _varint(view, at)
            continue
        if wire in (1, 5):
            at += 8 if wire == 1 else 4
            continue
        if wire != 2:
            raise IndexError
        size, at = _varint(view, at)
        body, at = view[at : at + size], at + size
        if len(body) < size:
            raise IndexError
        drops = number in _DROPPED.get(kind, ()) or (kind == "tensor" and number in _DATA_NUMBERS)
        if size <= LARGE_BYTES or not (drops or number in paths):
            continue
        yield view[copied:start]
        copied = at
        if not drops:
            inner = b"".join(_without_large(body, paths[number]))
            yield _encoded(key) + _encoded(len(inner)) + inner
    yield view[copied : len(view)]


# Messages


def _compare(model: Any, *, is_marked: bool) -> None:
    """Writes into the metadata of weights the facts that the importer otherwise derives from their numbers.

    These are: which weights are equal to each other, transposed or not; which are filled with one value; which repeat
    themselves; which are masks, tables of cosines and sines, or rows of a table; and the rank of folded products.

    Args:
        model: the parsed file.
        is_marked: whether the exporter marked the parameters. Of large tensors, only those that its optimiser computed
            are then looked at.
    """
    for tensor in model.graph.initializer:
        band = None if _is_external(tensor) else band_of(tensor)
        if band is not None and has_data(tensor):
            tensor.metadata_props.add(key=BAND_KEY, value=stated(band))
    folded = folded_sources(model.graph.value_info)
    held = {
        t.name: t
        for t in model.graph.initializer
        if has_data(t)
        and not _is_external(t)
        and (not is_marked or t.name in folded or prod(t.dims) <= MAX_VALUE_ELEMENTS)
    }
    nodes = [
        Node(n.op_type, list(n.input), list(n.output), {a.name: a.i for a in n.attribute}) for n in model.graph.node
    ]
    floats = {name: t for name, t in held.items() if t.data_type in WEIGHTS} | dequantised(nodes, held)
    same = {n.outputs[0]: n.inputs[0] for n in nodes if n.kind == "DequantizeLinear" and n.inputs[0] in floats}
    reads = [(node.kind, i, same.get(name, name)) for node in nodes for i, name in enumerate(node.inputs)]
    tables, heads = tables_and_heads(reads, {name: tuple(t.dims) for name, t in floats.items()})
    is_pytorch = model.producer_name == PYTORCH
    computed = computed_tables(reads, floats)
    added = {name for kind, _, name in reads if kind in READERS}
    numbers: dict[object, int] = {}
    for name, tensor in floats.items():
        noted = held[name].metadata_props
        if (found := periods(tensor)) != tuple(tensor.dims)[: len(found)]:
            noted.add(key=REPEATS_KEY, value=" ".join(map(str, found)))
        if name in computed:
            noted.add(key=COMPUTED_KEY, value="1")
        elif name in added and (rows := rows_of(tensor)):
            noted.add(key=ROWS_KEY, value=str(rows))
        if name in folded and (rank := rank_of(tensor)):
            noted.add(key=RANK_KEY, value=str(rank))
        if (is_pytorch or len(tensor.dims) == 1 or name in tables) and is_filled(tensor):
            noted.add(key=FILLED_KEY, value="1")
        elif name in tables | heads or (is_pytorch and name.startswith("onnx::") and len(tensor.dims) > 1):
            table, turned = (rounded_table(name, tables, floats) if name in heads else None) or (name, False)
            number = numbers.setdefault(content(floats[table], turned=turned), len(numbers))
            noted.add(key=CONTENT_KEY, value=str(number))
    for name, tensor in floats.items() if numbers else ():
        is_turned = name in tables or (is_pytorch and not name.startswith("onnx::"))
        if is_turned and len(tensor.dims) == 2 and not is_filled(tensor):
            other = numbers.get(content(tensor, turned=True))
            if other is not None:
                held[name].metadata_props.add(key=TURNED_KEY, value=str(other))


def _read_small(model: Any, folder: Path) -> dict[str, str]:
    """Reads initializers that may be small constants from external data into the model, as far as they can be read.

    Exporters write tensors of more than some hundred bytes to external data (PyTorch's newer one by default). Larger
    ones are read too if the exporter's optimiser computed them, since their numbers say from what.

    Returns:
        name of an initializer that could not be read -> the reason.
    """
    faults = {}
    folded = folded_sources(model.graph.value_info)
    for tensor in model.graph.initializer:
        most = MAX_ELEMENTS if tensor.name in folded else MAX_VALUE_ELEMENTS
        if not _is_external(tensor) or prod(tensor.dims) > most:
            continue
        try:
            if not any(entry.key == "length" for entry in tensor.external_data):
                # If no length is stated, as ONNX allows, the library would read to the end of the file.
                size = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
                tensor.external_data.add(key="length", value=str(prod(tensor.dims) * size))
            length = next(entry.value for entry in tensor.external_data if entry.key == "length")
            if int(length) > 16 * most:
                raise ValueError(f"its length is {length} bytes")
            # The library rejects paths outside the folder.
            external_data_helper.load_external_data_for_tensor(tensor, str(folder))
        except (OSError, ValueError, KeyError, onnx.checker.ValidationError) as fault:
            faults[tensor.name] = str(fault)
    return faults


def _is_external(tensor: Any) -> bool:
    return tensor.data_location == onnx.TensorProto.EXTERNAL or len(tensor.external_data) > 0


def _clean(model: Any) -> None:
    """Removes information about the machine and the program that wrote the file, and any remaining large data."""
    for name in ("producer_version", "domain", "model_version", "doc_string", "training_info"):
        model.ClearField(name)
    if model.producer_name != PYTORCH:
        model.ClearField("producer_name")
    for tensor in _walk(model):
        if _is_external(tensor) or prod(tensor.dims) > MAX_VALUE_ELEMENTS:
            _clear(tensor)


def _clear(tensor: Any) -> None:
    for name in (*DATA_FIELDS, "external_data", "data_location", "segment"):
        tensor.ClearField(name)


def _walk(holder: Any) -> Iterator[Any]:
    """Yields every tensor in a message, and removes the doc strings and metadata of the messages around them."""
    descriptor = holder.DESCRIPTOR
    if "doc_string" in descriptor.fields_by_name:
        holder.ClearField("doc_string")
    if "metadata_props" in descriptor.fields_by_name and len(holder.metadata_props):
        kept = [entry for entry in holder.metadata_props if entry.key in KEPT_METADATA]
        holder.ClearField("metadata_props")
        holder.metadata_props.extend(kept)
    if descriptor.name == "TensorProto":
        yield holder
        return
    for field, held in holder.ListFields():
        if field.message_type is not None and field.name != "metadata_props":
            for one in held if field.is_repeated else (held,):
                yield from _walk(one)


def _drop_weights(model: Any, outside: Mapping[str, str], parameters: Sequence[str]) -> tuple[int, int]:
    """Removes the data of small tensors that the importer treats as parameters or buffers.

    Args:
        model: the parsed file.
        outside: name of an initializer in external data -> why it could not be read.
        parameters: as for `strip_file`.

    Returns:
        the numbers of tensors whose data was dropped and kept.
    """
    source = read_model(model, needs_values=False)
    guess = {} if source.has_metadata else roles_without_metadata(source)
    dropped = kept = 0
    for sparse in model.graph.sparse_initializer:
        _clear(sparse.values)
        _clear(sparse.indices)
        dropped += 1
    for tensor in model.graph.initializer:
        # Tensors that the reader replaced by a view of another parameter are weights, too.
        stored = source.stored.get(tensor.name)
        role = stored_role(tensor.name, stored, guess, parameters) if stored is not None else "parameter"
        # Only float tensors may be without data, or, in quantised files, integer weights.
        is_kept = role == "constant" or tensor.data_type not in FLOATS
        if is_kept and prod(tensor.dims) <= MAX_VALUE_ELEMENTS:
            if tensor.name in outside:
                repair = (
                    "Export with external_data=False. Or run `automap strip MODEL.onnx -o stripped.onnx` where the "
                    "file with the data lies beside the model, and give stripped.onnx."
                )
                value = ": ".join(filter(None, (tensor.name, outside[tensor.name])))
                raise refuse("a small constant lies in external data that could not be read", value, repair)
            kept += 1
        else:
            _clear(tensor)
            dropped += 1
    return dropped, kept
