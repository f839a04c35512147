"""How kernels are compiled: under a stated signature, when they are first called, into the cache, without fast-math."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys


class _Cache(FunctionCache):  # type: ignore[misc]
    """Reads machine code without importing what numba needs to make some, the larger part of it."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function, or None."""
        rtsys.initialize(target_context)
        return self._load_overload(sig, target_context)


class Kernel(CPUDispatcher):  # type: ignore[misc]
    """A compiled function of one signature.

    It is compiled, or read from the cache, when Python calls it or while a kernel that calls it is compiled. What the
    cache holds of a kernel holds its callees: a process reads those that Python calls and no others.
    """

    stated: Any
    """Numba's signature."""

    def enable_caching(self) -> None:
        """Into the folder of `automap.price`."""
        self._cache = _Cache(self.py_func)

    def compile(self, sig: Any = None) -> Any:
        """Compiles for the stated signature, whatever the first call is with; that is converted, or refused."""
        with global_compiler_lock:
            if self._can_compile:
                super().compile(self.stated)
                self.disable_compile()
        return self

    def _compile_for_args(self, *args: Any, **kws: Any) -> Any:
        return self.compile()


class _Inner(Kernel):
    """A kernel that only kernels call: Python is told of none of its overloads, since it has no entry from there."""

    def add_overload(self, cres: Any) -> None:
        """Keeps it for kernels."""
        self.overloads[tuple(cres.signature.args)] = cres


def _stating(*, makes_arrays: bool) -> Callable[..., Callable[..., Any]]:
    def state(signature: Any, *, inner: bool = False, forceinline: bool = False) -> Callable[..., Any]:
        # All is said: numba would take what is not from the kernel whose compilation asks for this one.
        options = {
            "nopython": True,
            "_nrt": makes_arrays,
            "forceinline": forceinline,
            "fastmath": False,
            "error_model": "python",
            "no_cpython_wrapper": inner,
            "no_cfunc_wrapper": True,
        }

        def decorate(function: Callable[..., Any]) -> Any:
            made = (_Inner if inner else Kernel)(function, targetoptions=options)
            made.stated = signature
            made.enable_caching()
            return made

        return decorate

    return state


kernel = _stating(makes_arrays=True)
"""Takes numba's signature, and `inner` for what only kernels call. For functions that make arrays."""

borrowing = _stating(makes_arrays=False)
"""Likewise, for functions that make no arrays: they borrow their caller's and count no references, which would cost
more than most of them do."""
