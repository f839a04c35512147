"""A PyTorch module as an ONNX file of a few MB: the graph without its weights.

The module is built on the meta device, so that a model of any size exports on a laptop. Parameters and buffers become
graph inputs; the exporter's metadata tells them apart (`InputSpec.kind`) and names the module of each operator
(`name_scopes`). Stack traces and all other paths of the exporting machine are removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automap.errors import ModelError, UserError
from automap.phases import phase
from automap.runtime import export_faults
from automap.runtime.onnx_translations import translations
from automap.runtime.read_parameters import frozen, keep_outputs_with_parameters, unread
from automap.runtime.transformers_models import (
    as_trained,
    example_inputs,
    from_config,
    is_transformers,
    quantised,
    with_mask,
)
from ir.build import MAX_VALUE_ELEMENTS
from ir.graph import AS_ARGUMENT
from ir.onnx.load import load_model
from ir.onnx.readers.nodes import FROZEN_KEY, QUANTISED_KEY, UNREAD_KEY
from ir.repairs import TWO_SAMPLES

if TYPE_CHECKING:
    from torch import Tensor, nn

Build = Callable[[], "nn.Module | tuple[nn.Module, Tensor | tuple[Any, ...] | dict[str, Any]]"]

_SCOPES = "pkg.torch.onnx.name_scopes"
_KEPT_METADATA = frozenset(
    {"pkg.torch.export.graph_signature.InputSpec.kind", _SCOPES, "pkg.torch.onnx.class_hierarchy"}
)
# All other metadata names files of this machine (stack_trace) or repeats what is kept.

_RULES = (
    "add_0", "sub_0", "mul_by_1", "div_by_1", "dropout_inference", "cast_cast", "no_op_cast", "no_op_expand",
    "no_op_transpose", "no_op_static_scatter_nd", "no_op_dynamic_scatter_nd", "transpose_transpose",
    "flatten_to_reshape", "reshape_reshape", "unsqueeze_unsqueeze", "squeeze_reshape_1d",
)  # fmt: skip
_LATER_RULES = (
    "cast_constant_of_shape", "cast_constant_of_shape_without_value", "collapse_slice", "collapse_slice2",
    "materialize_reshape_shape",
)  # fmt: skip
"""Rewrites of onnxscript that remove what exporters add. Its whole optimiser has one more, slices of one tensor to a
split, which compares every operator with every other: 36 of 75 s for a Llama of 24 layers."""


def export_onnx(build: Build, path: Path | None = None, *, opset: int = 20, name: str = "") -> bytes:
    """Exports a module without weights.

    Args:
        build: returns the module and example inputs (one tensor, a tuple of positional ones, or a dictionary of keyword
            ones), or a model of transformers alone; called under `torch.device("meta")`, so that nothing is allocated.
            The batch is the leading dim of the inputs and may be 1.
        path: the path of the file to be written; None = no file.
        opset: the version of ONNX's operator set.
        name: the name of the graph in the file; empty = the class of the module.

    Returns:
        The bytes of the file. The first output of its graph are the scores: what the module returns alone, first in a
        tuple, or as `logits` of a dictionary or a dataclass. Dropout is off and batch normalisation is one operator, as
        in evaluation mode: what training adds follows from the plan, not from the file. Of a model of transformers,
        the outputs are the scores (or the loss, if labels are among the inputs) and what further heads return; caches
        are off. The file says which parameters no output reads, and names those that are frozen.

    Raises:
        ModelError: the module cannot be built or exported; names the module at fault.
    """
    import onnx_ir
    import torch

    # With gradients, attention takes a kernel by what requires one, and its result has other strides than in the pass
    # that translates it.
    with quiet(), phase("exporting the model"), torch.no_grad():
        with torch.device("meta"):
            module, args, kwargs = _built(build)
        module.eval()
        try:
            model = _to_onnx(module, args, kwargs, opset)
        except ModelError:
            if not (masked := with_mask(module, kwargs)):
                raise
            model = _to_onnx(module, args, masked, opset)
        if is_transformers(module):
            keep_outputs_with_parameters(model, module)
        for value in model.graph.inputs:
            if value.name in model.graph.initializers:
                value.name += AS_ARGUMENT
        # Parameters of a module that was built before have values, which the optimiser would fold into constants.
        parameters = {key for key, _ in module.named_parameters(remove_duplicate=False)}
        for key, value in list(model.graph.initializers.items()):
            if key in parameters or _without_values(value.const_value):
                del model.graph.initializers[key]
                value.const_value = None
                model.graph.inputs.append(value)
        _simplify(model)
        model.graph.name = name or type(module).__name__
        _strip(model)
        if missing := unread(model, module):
            model.metadata_props[UNREAD_KEY] = missing
        if is_transformers(module) and (stored := quantised(module)):
            model.metadata_props[QUANTISED_KEY] = stored
        if fixed := frozen(module):
            model.metadata_props[FROZEN_KEY] = json.dumps(fixed)
        data: bytes = onnx_ir.to_proto(model).SerializeToString(deterministic=True)
    if path is not None:
        path.write_bytes(data)
    return data


def export_config(spec: str, path: Path | None = None, *, opset: int = 20, name: str = "") -> bytes:
    """Exports the model of a configuration of transformers, see `automap.runtime.transformers_models.from_config`.

    The exporter leaves out views that change nothing at one sample. Where the file cannot be read without them, as that
    of Inkling, it is exported with two samples.

    Args:
        spec: the configuration.
        path, opset, name: see `export_onnx`.

    Raises:
        ModelError: the configuration is not accepted, or the model cannot be exported.
    """
    data = export_onnx(from_config(spec), opset=opset, name=name)
    try:
        load_model(data)
    except ModelError as fault:
        # Other faults do not depend on the number of samples; whoever reads the file reports them.
        if TWO_SAMPLES in fault.repair:
            data = export_onnx(from_config(spec, num_samples=2), opset=opset, name=name)
    if path is not None:
        path.write_bytes(data)
    return data


def _built(build: Build) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module, its positional and its keyword inputs."""
    import torch
    from torch import Tensor, nn
    from torch.utils._pytree import tree_map_only

    try:
        made = build()
    except UserError:
        raise
    except Exception as fault:
        raise export_faults.while_building(build, fault) from None
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise ModelError(
            "the function returns no module",
            field="source",
            value=type(module).__name__,
            repair="Return the module and its example inputs, as examples/gpt2.py does.",
        )
    if is_transformers(module):
        as_trained(module)
        inputs = example_inputs(module) if inputs is None else inputs
    # A module or inputs that were made before the function was called are not on the meta device, nor is what
    # `torch.Tensor(…)` makes.
    parameters = list(module.parameters())
    if any(p.is_meta for p in parameters):
        _move_to_meta(module)
        inputs = tree_map_only(Tensor, lambda x: x.to("meta"), inputs)
    elif parameters:
        device = parameters[0].device
        inputs = tree_map_only(
            Tensor, lambda x: torch.zeros_like(x, device=device) if x.is_meta else x.to(device), inputs
        )
    if isinstance(inputs, Tensor):
        return module, (inputs,), {}
    if isinstance(inputs, Mapping):
        return module, (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return module, tuple(inputs), {}
    raise ModelError(
        "the function returns no example inputs",
        field="source",
        value=type(inputs).__name__,
        repair="Return them beside the module: a tensor, a tuple of tensors, or a dictionary of keyword arguments.",
    )


def _move_to_meta(module: nn.Module) -> None:
    """Gives up the values of all parameters; those that several modules share stay one."""
    from torch import nn

    moved: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_meta:
                fresh = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                part._parameters[name] = moved.setdefault(parameter, fresh)


def _to_onnx(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], opset: int) -> Any:
    """What torch's exporter makes of a module, as it is.

    Raises:
        ModelError: the exporter failed.
    """
    import torch

    from automap.runtime.constant_values import ConstantValues
    from automap.runtime.layer_exports import layers_for_export
    from automap.runtime.real_numbers import with_real_numbers
    from automap.runtime.scan_exports import scans_as_operators

    exported = None
    # A forward that makes tensors without saying where makes them on the CPU; the others wait on the meta device.
    on_meta = all(parameter.is_meta for parameter in module.parameters())
    try:
        with (
            ConstantValues(), scans_as_operators(module), layers_for_export(module), _masks_as_given(),
            _scores_first(module), _unchecked(),
        ):  # fmt: skip
            try:
                exported = torch.export.export(module, args, kwargs)
            except Exception as fault:
                if not (on_meta and "FakeTensorDeviceMismatchError" in f"{type(fault).__name__}{fault}"):
                    raise
                with torch.device("meta"):
                    exported = torch.export.export(module, args, kwargs)
        program: Any = torch.onnx.export(
            with_real_numbers(exported),
            dynamo=True,
            export_params=False,
            optimize=False,  # folding constants reads values, which meta tensors lack: it runs once they are inputs
            opset_version=opset,
            custom_translation_table=translations(opset),
            verbose=False,
        )
    except Exception as fault:
        raise export_faults.while_exporting(module, exported, fault) from None
    return program.model


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    """A context in which `torch.distributions` does not check its arguments: a check branches on their values."""
    import torch

    checked = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(checked)


@contextlib.contextmanager
def _scores_first(module: nn.Module) -> Iterator[None]:
    """A context in which a module returns a dictionary in place of a dataclass, and `logits` first of a dictionary.

    The first output of a graph are its scores, and torch exports no dataclasses. Models of transformers do both.
    """
    forward, held = module.forward, vars(module).get("forward")

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        found = forward(*args, **kwargs)
        if dataclasses.is_dataclass(found) and not isinstance(found, Mapping):
            found = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        is_own = type(found) in (dict, OrderedDict)
        return {"logits": found["logits"], **found} if is_own and "logits" in found else found

    module.forward = run
    try:
        yield
    finally:
        if held is None:
            del module.forward
        else:
            module.forward = held


@contextlib.contextmanager
def _masks_as_given() -> Iterator[None]:
    """A context in which torch's own transformers apply each mask that they are given.

    They compare it with the causal mask first, and may leave it out then: in an export it has no values.
    """
    from torch.nn.modules import transformer

    own = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = own


def _simplify(model: Any) -> None:
    """Removes what the exporter added; the same passes as `onnxscript.optimizer.optimize_ir`, with `_RULES`."""
    from onnx_ir.passes import common
    from onnxscript import optimizer, rewriter
    from onnxscript.rewriter.rules import common as rules

    common.InlinePass()(model)
    # The importer reads no larger values: what is left to be computed, such as a mask, tells more than what is stored.
    optimizer.fold_constants_ir(model, onnx_shape_inference=True, output_size_limit=MAX_VALUE_ELEMENTS)
    first, later = ([getattr(rules, f"{rule}_rule") for rule in some] for some in (_RULES, _LATER_RULES))
    rewriter.rewrite(model, [*first, *_products(), *later])
    for after in (
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    ):
        after(model)


def _products() -> list[Any]:
    """Rewrites of onnxscript that remove reshapes around products, but for those that hold at a batch of 1 alone.

    Of a sample, [1, heads, …] and [heads, …] can be multiplied as they are; of more, [samples * heads, …] cannot.
    """
    from onnxscript import rewriter
    from onnxscript.rewriter.rules.common import _broadcast_to_matmul as known

    def two(op: Any, input_a: Any, input_b: Any, shape_a: Any, shape_b: Any, shape_c: Any) -> Any:
        return op.Reshape(op.MatMul(op.Reshape(input_a, shape_a), op.Reshape(input_b, shape_b)), shape_c)

    def one(op: Any, input_a: Any, input_b: Any, shape_a: Any, shape_c: Any) -> Any:
        return op.Reshape(op.MatMul(op.Reshape(input_a, shape_a), input_b), shape_c)

    def product(op: Any, input_a: Any, input_b: Any, **_: Any) -> Any:
        return op.MatMul(input_a, input_b)

    def holds(context: Any, input_a: Any, input_b: Any, **shapes: Any) -> bool:
        if not known.check_if_not_need_reshape(context, input_a, input_b, **shapes):
            return False
        first, second = (len(value.shape) for value in (input_a, input_b))
        return first == second or min(first, second) <= 2

    return [rewriter.RewriteRule(pattern, product, holds) for pattern in (two, one)]


def _without_values(tensor: Any) -> bool:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    raw = getattr(tensor, "raw", None)
    return isinstance(raw, torch.Tensor) and (raw.device.type == "meta" or isinstance(raw, FakeTensor))


def _strip(model: Any) -> None:
    """Removes all metadata that the importer does not read."""
    holders = [model, model.graph, *model.graph.inputs, *model.graph.initializers.values()]
    for node in model.graph.all_nodes():
        holders += [node, *node.outputs]
        # A node that the optimiser inserted belongs to the module of its input.
        if _SCOPES not in node.metadata_props:
            sources = [value.producer() for value in node.inputs if value is not None]
            scopes = [
                source.metadata_props[_SCOPES] for source in sources if source and _SCOPES in source.metadata_props
            ]
            if scopes:
                node.metadata_props[_SCOPES] = scopes[0]
    for holder in holders:
        for key in [key for key in holder.metadata_props if key not in _KEPT_METADATA]:
            del holder.metadata_props[key]
        holder.doc_string = None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A context without the exporter's reports: progress, optional packages, deprecations, and graphs that failed."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        said = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
