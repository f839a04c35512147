"""How kernels are compiled: ahead of their first call, into the cache, without fast-math."""

from __future__ import annotations

import functools

from numba import njit

kernel = functools.partial(njit, cache=True, no_cfunc_wrapper=True)
"""Takes numba's signature. For functions that make arrays."""

borrowing = functools.partial(njit, cache=True, no_cfunc_wrapper=True, _nrt=False)
"""Takes numba's signature. For functions that make no arrays: they borrow their caller's and count no references, which
would cost more than most of them do."""
