"""How kernels are compiled: for a stated signature, when they are first needed, once a machine, without fast-math.

Compiled kernels are kept in a folder of the user's cache. The name of a kernel's file holds a digest of everything that
its machine code depends on: its bytecode, its constants and every kernel that it calls. Any checkout or installation
with the same kernels finds these files, and an edit compiles again only the kernels that depend on it.

A process that misses a kernel starts others, which compile the rest on the other processor cores
(`automap.compile_all`).

This module relies on numba's internals in three places, each for time that was measured on one core of a Xeon with
numba 0.68: `_Library` and `_prepare` for compiling all kernels, `Kernel` for reading them back.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import numba
import numpy as np
import platformdirs
from llvmlite.binding import Linkage, get_host_cpu_features, get_host_cpu_name, parse_assembly
from llvmlite.binding.object_file import ObjectFileRef
from numba import _dynfunc
from numba.cloudpickle import dumps, loads
from numba.core import bytecode
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler import compile_result
from numba.core.compiler_lock import global_compiler_lock
from numba.core.environment import Environment
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys

from automap.kernel_digests import digest_of, globals_of
from automap.kernel_processes import compiling, start_others


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """The code of one function, which is optimised and turned into machine code only when Python needs its address.

    Numba does both for every function, also for functions that are only linked into others and optimised again there.
    Without that, compiling all kernels takes 51 s in place of 67 s.
    """

    def __init__(self, codegen: Any, name: str) -> None:
        super().__init__(codegen, name)
        self.enable_object_caching()

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    apart = False
    """Whether others call its functions at their addresses, and link none of their code."""

    def _get_module_for_linking(self) -> Any:
        if self.apart:
            return parse_assembly(str(self._codegen._create_empty_module(self.name)))
        return super()._get_module_for_linking()

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        if not self._compiled and name in {function.name for function in self.get_defined_functions()}:
            # Kernels that are linked in are called from here alone: LLVM then drops what they do not read of their
            # arguments. Decisions take 8 % less time, and the code is 15 % smaller.
            for function in self._final_module.functions:
                if function.linkage == Linkage.linkonce_odr and function.name.startswith("_ZN"):
                    function.linkage = "internal"
            super()._optimize_final_module()
            super()._finalize_final_module()
        address: int = super().get_pointer_to_function(name)
        return address


def _set_env(self: Any, name: str, environment: Any, original: Callable[..., None] = JITCPUCodegen.set_env) -> None:
    # A function without machine code has no place for its environment yet.
    if self._engine.is_symbol_defined(name):
        original(self, name, environment)


JITCPUCodegen._library_class = _Library
JITCPUCodegen.set_env = _set_env


@cache
def _prepare() -> None:
    """Prepares this process for compiling; reading kernels back needs none of it."""
    from numba.extending import overload
    from numba.np import arrayobj

    from automap import numba_lowering  # noqa: F401 - changes numba; numba's arrays, which it imports, take 20 ms

    def refuse(source: Any, target: Any) -> None:
        raise NotImplementedError

    @overload(refuse)
    def _(source: Any, target: Any) -> Any:
        def refuse(source: Any, target: Any) -> None:
            raise ValueError("cannot assign a slice of another shape")

        return refuse

    # Numba's own message names both shapes; to compile the formatting of numbers takes 4 s of 67 s.
    arrayobj.raise_with_shape_context = refuse
    # Names of functions end in a number. Code from several processes is linked together, so no two may use the same.
    bytecode.FunctionIdentity._unique_ids = itertools.count(int.from_bytes(os.urandom(6), "big"))


class _Folder(NamedTuple):
    """Where compiled kernels are kept."""

    path: Path
    about: str
    """What is told while they are compiled: for whom, and what would help where that is not for good."""


@cache
def _cache_folder() -> _Folder:
    """A folder under NUMBA_CACHE_DIR or the user's cache; a temporary folder where that cannot be written."""
    versions = (numba.__version__, llvmlite.__version__, np.__version__, sys.version)
    sources = [Path(__file__).with_name(name).read_text() for name in ("jit.py", "numba_lowering.py")]
    machine = (get_host_cpu_name(), get_host_cpu_features().flatten())
    name = f"kernels-{hashlib.sha256(repr((versions, sources, machine)).encode()).hexdigest()[:16]}"
    own = Path(numba.config.CACHE_DIR or platformdirs.user_cache_path("automap"))
    shared = Path(tempfile.gettempdir())
    repair = f"for {own} cannot be written; NUMBA_CACHE_DIR names another folder"
    for root, about in ((own, "once on this machine"), (shared, f"into {shared}, {repair}")):
        folder = root / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        # What is read from here is unpickled and run: a folder that somebody else made is not trusted.
        if os.access(folder, os.W_OK) and folder.stat().st_uid in (os.getuid(), 0):
            return _Folder(folder, about)
    return _Folder(Path(tempfile.mkdtemp(prefix="automap-kernels-")), f"for this process alone, {repair}")


def _read(path: Path) -> Any:
    return loads(path.read_bytes()) if path.exists() else None


def _write(path: Path, found: Any) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(dumps(found))
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Waits until no other process compiles the kernel that `path` is named after.

    Processes cannot wait for each other in a circle, because no kernel calls one that calls it.
    """
    collecting = gc.isenabled()
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        gc.disable()  # the compiler makes many objects and little garbage: 3 s of 67 s
        yield
    finally:
        os.close(descriptor)
        if collecting:
            gc.enable()


class Kernel(CPUDispatcher):  # type: ignore[misc]
    """A compiled function of one signature.

    Python runs its machine code, which contains the kernels that it calls. A kernel that calls it links its
    intermediate code, or calls its machine code if it is compiled apart. Each of the two is read from the cache, or
    made, when it is first needed. Numba's own cache reads both: to read the machine code alone of all kernels that
    Python calls takes 0.35 s in place of 0.9 s.
    """

    stated: Any
    """Numba's signature of the kernel."""
    inner: bool
    """Whether only kernels call it, so that Python cannot."""
    apart: bool
    """Whether kernels that call it leave its code where it is."""
    shares_work = True
    """Whether processes for the other cores are started where a kernel of AutoMAP is not in the cache."""
    _loaded: tuple[str, str, list[Any]] | None = None
    _can_compile: bool

    def _file(self, kind: str) -> Path:
        return _cache_folder().path / f"{self.__module__}.{self.__name__}-{self.digest}.{kind}"

    @property
    def is_being_made(self) -> bool:
        """Whether another process makes its machine code at this moment."""
        with self._file("code-lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    @cached_property
    def _calls(self) -> list[Kernel]:
        """The other kernels that it calls."""
        values = (self.py_func.__globals__.get(name) for name in globals_of(self.py_func.__code__))
        return [value for value in values if isinstance(value, Kernel) and value is not self]

    @cached_property
    def size(self) -> int:
        """Bytes of bytecode that the machine code is made from, those of the kernels that are linked in included."""
        return len(self.py_func.__code__.co_code) + sum(other.size for other in self._calls if not other.apart)

    @cached_property
    def _calls_apart(self) -> list[Kernel]:
        """The kernels apart that its machine code calls."""
        found: dict[Kernel, None] = {}
        for other in self._calls:
            found.update(dict.fromkeys([other] if other.apart else other._calls_apart))
        return list(found)

    @cached_property
    def digest(self) -> str:
        """Digest of everything that the machine code depends on, in hexadecimal."""
        kinds = [self.stated.return_type, *self.stated.args]
        return digest_of(self, kinds, [self.targetoptions, self.apart])

    def compile(self, sig: Any = None) -> Any:
        """Reads or makes what kernels that call this one need: its intermediate code, or machine code if it is apart.

        Args:
            sig: signature that numba asks for; the stated one is used in its place.
        """
        with global_compiler_lock:
            self._get_linked()
            if self.apart:
                self._load_code()
        return self

    def load(self) -> None:
        """Reads or makes the machine code, for calls from Python."""
        with global_compiler_lock:
            if self._can_compile and not self.inner:
                self._called = self._function(*self._load_code())  # numba's dispatcher counts no reference to it
                self._insert([argument._code for argument in self.stated.args], self._called, False)
            self._can_compile = False

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """The signature that numba needs while it compiles a caller."""
        self.compile()
        return super().get_call_template(args, kws)

    def _compile_for_args(self, *args: Any, **kws: Any) -> Any:
        self.load()
        return self

    def _search_new_conversions(self, *args: Any, **kws: Any) -> bool:
        """Whether the arguments convert to the stated types, as contiguous arrays do to strided ones.

        numba looks at the signatures that it compiled itself, of which there are none where the cache had the code.
        """
        given = [self.typeof_pyval(argument) for argument in args]
        return bool(self.typingctx.install_possible_conversions(given, self.stated.args))

    def _get_linked(self) -> Any:
        """Reads or makes the intermediate code."""
        kinds = tuple(self.stated.args)
        if kinds not in self.overloads:
            _prepare()
            with _exclusive(self._file("lock")):
                found = _read(self._file("link"))
                self.overloads[kinds] = self._make() if found is None else self._link(*found)
            self.overloads[kinds].library.apart = self.apart
        return self.overloads[kinds]

    def _load_code(self) -> tuple[str, str, list[Any]]:
        """Reads or makes the machine code, after that of the kernels apart that it calls.

        Returns:
            The arguments of `_function`.
        """
        if self._loaded is None:
            for other in self._calls_apart:
                other._load_code()
            with self._telling(), _exclusive(self._file("code-lock")):
                found = _read(self._file("code"))
                if found is None:
                    found = self._make_code()
                else:
                    rtsys.initialize(self.targetctx)
                    self.targetctx.codegen()._engine._ee.add_object_file(ObjectFileRef.from_data(found[0]))
            self._loaded = found[1:]
        return self._loaded

    def _telling(self) -> contextlib.AbstractContextManager[None]:
        """A phase that is told, where the machine code is not there yet: it is made, or another process makes it."""
        if self._file("code").exists():
            return contextlib.nullcontext()
        is_ours = self.shares_work and ".kernels" in self.__module__
        if is_ours:
            start_others()
        return compiling(_cache_folder().about, is_ours=is_ours)

    def _make(self) -> Any:
        # The kernel's own number follows from its digest: machine code that was made before calls it by this name.
        numbers = bytecode.FunctionIdentity._unique_ids
        bytecode.FunctionIdentity._unique_ids = itertools.chain([int(self.digest, 16) >> 20], numbers)
        try:
            with self._compiling_counter:  # so that numba recognises a kernel that calls itself
                made = self._compiler.compile(tuple(self.stated.args), self.stated.return_type)
        finally:
            bytecode.FunctionIdentity._unique_ids = numbers
        assert not made.reload_init
        made.fndesc.typemap = made.fndesc.calltypes = None  # large, and not needed to link
        found = (made.library.serialize_using_bitcode(), made.fndesc, list(made.environment.consts))
        _write(self._file("link"), found)
        return made

    def _link(self, code: Any, description: Any, constants: list[Any]) -> Any:
        library = self.targetctx.codegen().unserialize_library(code)
        function = object()
        self.targetctx.insert_user_function(function, description, [library])
        environment = self._environment(description.env_name, constants)
        return compile_result(
            entry_point=function,
            signature=self.stated,
            objectmode=False,
            fndesc=description,
            library=library,
            environment=environment,
        )

    def _environment(self, name: str, constants: list[Any]) -> Any:
        """Numba's record of the Python objects that the machine code refers to."""
        made = Environment(self.py_func.__globals__)
        made.env_name = name
        made.consts[:] = constants
        return made

    def _make_code(self) -> tuple[bytes, str, str, list[Any]]:
        """Machine code, and the arguments of `_function`."""
        linked = self._get_linked()
        name = linked.fndesc.llvm_func_name if self.inner else linked.fndesc.llvm_cpython_wrapper_name
        linked.library.get_pointer_to_function(name)
        constants = list(linked.environment.consts)
        found = (linked.library._get_compiled_object(), name, linked.fndesc.env_name, constants)
        _write(self._file("code"), found)
        return found

    def _function(self, name: str, env_name: str, constants: list[Any]) -> Any:
        """The Python function that runs the machine code."""
        codegen = self.targetctx.codegen()
        codegen._engine._defined_symbols |= {name, env_name}
        environment = self._environment(env_name, constants)
        codegen.set_env(env_name, environment)
        module = sys.modules[self.__module__]
        address = codegen._engine.get_function_address(name)
        return _dynfunc.make_function(module, self.__name__, self.__doc__ or "", address, environment, ())


KERNELS: list[Kernel] = []
"""Kernels that Python may call, of the modules that are imported."""


def _stating(*, makes_arrays: bool) -> Callable[..., Callable[..., Any]]:
    def state(
        signature: Any, *, inner: bool = False, apart: bool = False, forceinline: bool = False
    ) -> Callable[..., Any]:
        # Every option is stated: numba takes one that is not from the kernel that is being compiled.
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
            made = Kernel(function, targetoptions=options)
            made.stated = signature
            made.inner = inner
            made.apart = apart
            if not inner:
                KERNELS.append(made)
            return made

        return decorate

    return state


kernel = _stating(makes_arrays=True)
"""Decorates a function that makes arrays; takes numba's signature, and `inner` for functions that only kernels call.

`apart` is for large functions that several kernels call, each time for work that is long beside a call: their machine
code is made once, in place of once in every kernel that Python calls. With those that are compiled apart, all machine
code is 3.4 MB in place of 4.9, and nothing is slower. Functions of single decisions are linked in: episodes took a
tenth more time with them apart.

A function that makes arrays counts references to all arrays of its records whenever it passes them on. So it makes the
arrays, and for each loop it calls a function that borrows them: nearest legal plans
took three times as long with the loop in the kernel.
"""

borrowing = _stating(makes_arrays=False)
"""Decorates a function that makes no arrays: it borrows those of its caller and counts no references to them, which
would cost more time than most such functions take."""
