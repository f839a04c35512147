"""How kernels are lowered to LLVM's intermediate code, where numba's own way is slow for large named tuples.

Kernels take named tuples of a hundred arrays. By numba's own way each of their thousand words is a separate argument,
and all of them are copied wherever one field is read. Here a named tuple is passed as the address of its fields, and a
field is read from there. One process compiles all kernels in 47 s of processor time in place of 64 s, and no kernel has
to be inlined for the sake of its arguments.

A local variable keeps the address of a named tuple, unless four or more variables are assigned in one statement, for
which Python makes a tuple. Importing this module changes numba for the whole process.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from llvmlite.ir import Constant, Instruction, PhiInstr
from numba import types
from numba.core import funcdesc
from numba.core.analysis import compute_cfg_from_blocks, compute_use_defs, must_use_alloca
from numba.core.callconv import CPUCallConv
from numba.core.cgutils import gep_inbounds
from numba.core.datamodel.models import TupleModel, UniTupleModel
from numba.core.imputils import impl_ret_borrowed
from numba.core.ir import Assign
from numba.core.lowering import Lower
from numba.extending import lower_getattr_generic, register_model
from numba.np import arrayobj

# -- named tuples ---------------------------------------------------------------------------------------------------


class _ByAddress:
    """How a named tuple is passed: as the address of memory that is not written to until the call returns.

    Values carry notes: `address` is memory that holds the value wherever the value is known; `is_argument` says that
    the caller owns this memory; `fields` are the values of fields that were taken out of it.
    """

    def get_argument_type(self: Any) -> Any:
        return self.get_value_type().as_pointer()

    def as_argument(self, builder: Any, value: Any) -> Any:
        if hasattr(value, "address"):
            return value.address
        with builder.goto_entry_block():
            address = builder.alloca(value.type)
        with _behind(builder, value):
            builder.store(value, address)
        if _is_computed(value):
            value.address = address
        return address

    def from_argument(self, builder: Any, value: Any) -> Any:
        return _load(builder, value)


@register_model(types.NamedTuple)
class _NamedTuple(_ByAddress, TupleModel):  # type: ignore[misc]
    pass


@register_model(types.NamedUniTuple)
class _NamedUniTuple(_ByAddress, UniTupleModel):  # type: ignore[misc]
    pass


def _is_computed(value: Any) -> bool:
    """Whether one instruction computes a value, so that others can be put after it."""
    return isinstance(value, Instruction) and not isinstance(value, PhiInstr)


@contextlib.contextmanager
def _behind(builder: Any, value: Any) -> Iterator[None]:
    """Puts instructions directly after the one that computes a value: they run wherever the value is known."""
    block = builder.block
    if _is_computed(value):
        builder.position_after(value)
    yield
    builder.position_at_end(block)


def _load(builder: Any, address: Any) -> Any:
    """The value at an address inside an argument."""
    value = builder.load(address)
    value.address, value.is_argument = address, True
    return value


def _field(context: Any, builder: Any, kind: Any, value: Any, name: str) -> Any:
    """The value of one field of a named tuple."""
    index = kind.fields.index(name)
    if hasattr(value, "is_argument"):
        found = _load(builder, gep_inbounds(builder, value.address, 0, index))
    elif not _is_computed(value):
        found = builder.extract_value(value, index)
    else:
        value.fields = getattr(value, "fields", {})
        if index not in value.fields:
            with _behind(builder, value):
                value.fields[index] = builder.extract_value(value, index)
        found = value.fields[index]
    return impl_ret_borrowed(context, builder, kind[index], found)


lower_getattr_generic(types.NamedTuple)(_field)
lower_getattr_generic(types.NamedUniTuple)(_field)


def _name_arguments(
    self: Any,
    function: Any,
    names: Any,
    kinds: Any,
    noalias: bool = False,
    original: Any = CPUCallConv.decorate_function,
) -> None:
    """Tells LLVM that named tuples which are passed stay as they are."""
    original(self, function, names, kinds, noalias)
    values = self._get_arg_packer(kinds)._unflattener.unflatten(self.get_arguments(function))
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, types.BaseNamedTuple):
            # `add_attribute` does not know "readonly".
            for attribute in ("captures(none)", "noalias", "readonly"):
                set.add(value.attributes, attribute)


CPUCallConv.decorate_function = _name_arguments

# -- variables ------------------------------------------------------------------------------------------------------


def _find_values(self: Any, original: Any = Lower._find_singly_assigned_variable) -> None:
    """Finds the variables whose values are used as they are.

    Numba keeps all others in memory until LLVM finds out that they need none, where `address` is lost. To those that
    numba finds, which are used in one block, are added those with one assignment that comes before every use.
    """
    original(self)
    # Memory is also how numba knows which references to arrays it still has to give back.
    if self.context.enable_nrt or self.func_ir.func_id.is_generator:
        return
    blocks = self.func_ir.blocks
    assigned: dict[str, list[int]] = {}
    for label, block in blocks.items():
        for statement in block.find_insts(Assign):
            assigned.setdefault(statement.target.name, []).append(label)
    in_memory = {*must_use_alloca(blocks), *(name for name, labels in assigned.items() if len(labels) > 1)}
    dominators = compute_cfg_from_blocks(blocks).dominators()
    for label, names in compute_use_defs(blocks).usemap.items():
        for name in names:
            first = assigned.get(name, [label])[0]
            # Blocks are lowered in the order of their labels.
            if first >= label or first not in dominators[label]:
                in_memory.add(name)
    self._singly_assigned_vars |= assigned.keys() - in_memory


Lower._find_singly_assigned_variable = _find_values

# -- names ----------------------------------------------------------------------------------------------------------


def _mangle(
    name: str,
    kinds: Iterable[Any],
    *,
    abi_tags: Iterable[str] = (),
    uid: Any = None,
    original: Any = funcdesc.default_mangler,
) -> Any:
    """The name of a function in machine code, with a digest of its types: written out, they are 6,500 characters."""
    digest = hashlib.sha256(",".join(map(str, kinds)).encode()).hexdigest()[:16]
    return original(name, (), abi_tags=(*abi_tags, digest), uid=uid)


funcdesc.default_mangler = _mangle

# -- indices --------------------------------------------------------------------------------------------------------


def _index(
    context: Any, builder: Any, kind: Any, index: Any, size: Any, original: Any = arrayobj.fix_integer_index
) -> Any:
    """An index of an array as it is: only a constant may count from the end, as it does in functions of numba.

    To ask of every index whether it is negative takes a tenth to a fifth of the time of a decision.
    """
    if isinstance(index, Constant) and index.constant < 0:
        return original(context, builder, kind, index, size)
    return context.cast(builder, index, kind, types.intp)


arrayobj.fix_integer_index = _index
