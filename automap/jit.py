"""How kernels are compiled: under a stated signature, when they are first called, into the cache, without fast-math.

Machine code is kept in a folder of the user's cache that is named after the sources of all kernels: numba itself looks
only at the file of each function and would reuse a kernel whose callee has changed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import platformdirs
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys

_SOURCES = (
    "automap/**/kernels/*.py",
    "automap/jit.py",
    "automap/schedule.py",
    "automap/price/tables.py",
    "automap/price/kernel_shapes.py",
    "automap/space/compile.py",
    "envs/kernels.py",
    "ir/factors.py",
)
"""Files that hold kernels, or constants that kernels are compiled with."""


def _digest() -> str:
    root = Path(__file__).parent.parent
    sources = sorted({path for pattern in _SOURCES for path in root.glob(pattern)})
    text = b"".join(path.read_bytes() for path in sources)
    return hashlib.sha256(text + numba.__version__.encode()).hexdigest()[:16]


def _cache_folder() -> Path:
    """NUMBA_CACHE_DIR, else the user's cache; a temporary folder where that cannot be written."""
    name = f"kernels-{_digest()}"
    roots = [Path(numba.config.CACHE_DIR or platformdirs.user_cache_path("automap")), Path(tempfile.gettempdir())]
    for root in roots:
        folder = root / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        # numba unpickles what lies here: a folder that somebody else made is not trusted.
        if os.access(folder, os.W_OK) and folder.stat().st_uid in (os.getuid(), 0):
            return folder
    return Path(tempfile.mkdtemp(prefix="automap-kernels-"))


numba.config.CACHE_DIR = str(_cache_folder())


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
