"""Moves this process into new Linux namespaces, in which it has no user and no network.

Only Linux has namespaces, and it may refuse them: to unprivileged users, in containers, to a process with several
threads. A process in a new user namespace to which no user is mapped has no capabilities outside of it, whichever user
runs the service. Its network has no active interface, and it shares no message queues, shared memory or host name with
other processes.
https://man7.org/linux/man-pages/man7/user_namespaces.7.html
"""

from __future__ import annotations

import ctypes
import sys

_USER, _NETWORK, _IPC, _NAMES = 0x10000000, 0x40000000, 0x08000000, 0x04000000
"""CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWIPC, CLONE_NEWUTS of linux/sched.h."""


def leave_others() -> bool:
    """Enters new user, network, IPC and host name namespaces, all or none; returns whether the system allowed it."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.unshare(_USER | _NETWORK | _IPC | _NAMES) == 0)
