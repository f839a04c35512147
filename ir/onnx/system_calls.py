"""Restricts this process permanently to the system calls that a computation needs (Linux seccomp).

The kernel runs a small filter program at every system call. Calls that are not allowed fail with EPERM. A file that
exploits a bug in a parser can therefore neither rename or remove files, nor start or signal processes, nor use the
network, whichever user runs the service. Numbers of calls: `asm/unistd_64.h` (x86-64),
`asm-generic/unistd.h` (arm64). https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys
from typing import NamedTuple


class _Machine(NamedTuple):
    """The constants of one processor architecture."""

    arch: int
    """AUDIT_ARCH_... of linux/audit.h."""
    seccomp: int
    prlimit64: int
    allowed: tuple[int, ...]


_MACHINES = {
    "x86_64": _Machine(
        0xC000003E,
        317,
        302,
        # read write close fstat lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn sched_yield
        # mremap madvise nanosleep getpid exit sigaltstack gettid futex sched_getaffinity clock_gettime clock_nanosleep
        # exit_group getrandom rseq set_robust_list getrusage times
        (0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 28, 35, 39, 60, 131, 186, 202, 204, 228, 230, 231, 318, 334,
         273, 98, 100),
    ),
    "aarch64": _Machine(
        0xC00000B7,
        277,
        261,
        # The same calls.
        (63, 64, 57, 80, 62, 222, 226, 215, 214, 134, 135, 139, 124, 216, 233, 101, 172, 93, 132, 178, 98, 123, 113,
         115, 94, 278, 293, 99, 165, 153),
    ),
}  # fmt: skip

_NO_NEW_PRIVS, _FILTER, _ALL_THREADS = 38, 1, 1
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def keep_computing_only() -> bool:
    """Installs the filter; returns whether the system allowed it."""
    machine = _MACHINES.get(platform.machine()) if sys.platform == "linux" else None
    if machine is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    code = _code(machine)
    program = _Program(len(code) // 8, code)
    return bool(libc.syscall(machine.seccomp, _FILTER, _ALL_THREADS, ctypes.byref(program)) == 0)


def _code(machine: _Machine) -> bytes:
    """The filter program, in instructions of eight bytes (operation, two jumps, operand)."""

    def step(operation: int, operand: int, if_so: int = 0, if_not: int = 0) -> bytes:
        return struct.pack("HBBI", operation, if_so, if_not, operand)

    calls = len(machine.allowed)
    return b"".join(
        [
            step(_LOAD, _ARCH_AT),
            step(_JUMP_IF_EQUAL, machine.arch, if_so=1),
            step(_RETURN, _KILL),
            step(_LOAD, _NUMBER_AT),
            # An allowed call jumps to the last instruction, which allows it.
            *(step(_JUMP_IF_EQUAL, call, if_so=calls - at + 3) for at, call in enumerate(machine.allowed)),
            # prlimit64 is allowed for this process (process 0) only.
            step(_JUMP_IF_EQUAL, machine.prlimit64, if_so=0, if_not=2),
            step(_LOAD, _FIRST_ARGUMENT_AT),
            step(_JUMP_IF_EQUAL, 0, if_so=1),
            step(_RETURN, _ERROR | errno.EPERM),
            step(_RETURN, _ALLOW),
        ]
    )
