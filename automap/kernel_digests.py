"""Digests of kernels: of everything that the machine code of a function depends on."""

from __future__ import annotations

import functools
import hashlib
import opcode
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

import numpy as np
from numba import types
from numba.core.registry import CPUDispatcher

LOAD_GLOBAL, EXTENDED_ARG = opcode.opmap["LOAD_GLOBAL"], opcode.opmap["EXTENDED_ARG"]

_PLAIN = (int, float, bool, str, bytes, type(None), np.generic, np.dtype, types.Type)
"""Types of constants whose `repr` describes them completely."""


def digest_of(kernel: Any, kinds: Sequence[Any], options: Sequence[Any]) -> str:
    """Digest of a kernel's bytecode, its constants and every kernel that it calls, in hexadecimal.

    Args:
        kernel: the kernel (`automap.jit.Kernel`).
        kinds: numba's types of its result and its arguments.
        options: how it is compiled.
    """
    told = [[*map(_of_type, kinds), *options], _of_function(kernel.py_func, kernel)]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:20]


def _of_type(kind: Any) -> Any:
    """Description of one of numba's types, with the names of fields, which the type's own name leaves out."""
    if isinstance(kind, types.BaseTuple):
        return [str(getattr(kind, "instance_class", "")), getattr(kind, "fields", ()), *map(_of_type, kind)]
    return str(kind)


def _of_function(function: Any, caller: Any) -> Any:
    """Description of a Python function: its bytecode, and the values of all names that it reads."""
    within = {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }
    names = {name: value for name, value in {**function.__globals__, **within}.items() if value is not caller}
    return _of_code(function.__code__, names, skip=function.__doc__)


def _of_code(code: CodeType, names: dict[str, Any], skip: Any = None) -> Any:
    constants = [
        _of_code(value, names) if isinstance(value, CodeType) else _of_value(value)
        for value in code.co_consts
        if value is not skip or value is None
    ]
    named = [
        (name, _of_value(names[name], code.co_names))
        for name in (*globals_of(code), *code.co_freevars)
        if name in names
    ]
    return [code.co_code, code.co_varnames, code.co_names, constants, named]


@functools.cache
def globals_of(code: CodeType) -> tuple[str, ...]:
    """Names of the globals that a function reads, without those of attributes, which `co_names` holds as well."""
    found, argument, instructions = [], 0, code.co_code
    for number in range(0, len(instructions), 2):
        argument = argument << 8 | instructions[number + 1]
        if instructions[number] == LOAD_GLOBAL:
            found.append(code.co_names[argument >> 1])  # the last bit says how it is called
        if instructions[number] != EXTENDED_ARG:
            argument = 0
    return tuple(sorted(set(found)))


def _of_value(value: Any, names: tuple[str, ...] = ()) -> Any:
    if isinstance(value, CPUDispatcher):
        return value.digest
    if isinstance(value, ModuleType):
        if value.__name__.partition(".")[0] in ("math", "numpy", "numba", "builtins"):
            return value.__name__
        return [(name, _of_value(vars(value)[name])) for name in names if name in vars(value)]
    if isinstance(value, (tuple, list)):
        return [_of_value(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(repr(_of_value(item)) for item in value)
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, value.tobytes()]
    if isinstance(value, type):
        return [
            value.__qualname__,
            getattr(value, "_fields", None),
            *map(repr, getattr(value, "__members__", {}).values()),
        ]
    if isinstance(value, _PLAIN):
        return repr(value)
    if callable(value) and value.__module__.partition(".")[0] in ("math", "numpy", "numba", "builtins"):
        return [value.__module__, value.__qualname__]
    raise TypeError(f"a kernel reads {value!r}, and how its machine code depends on that is not known")
