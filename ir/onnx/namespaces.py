"""Moves this process into namespaces of its own, in which it has no user and no network.

Only Linux has them, and may refuse them: to users without rights, in containers, to a process with several threads. A
process in a user namespace of its own, to which no user is mapped, has no capability outside, whoever runs the service;
its network has no interface that is up, and it shares no message queues, shared memory or host name with others.
https://man7.org/linux/man-pages/man7/user_namespaces.7.html
"""

from __future__ import annotations

import ctypes
import sys

_USER, _NETWORK, _IPC, _NAMES = 0x10000000, 0x40000000, 0x08000000, 0x04000000
"""CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWIPC, CLONE_NEWUTS of linux/sched.h."""


def leave_others() -> bool:
    """Enters new namespaces, all or none; returns whether the system has done it."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.unshare(_USER | _NETWORK | _IPC | _NAMES) == 0)
