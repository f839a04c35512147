"""Times, bytes and rates as text that people read. Knows nothing of plans."""

from __future__ import annotations


def in_seconds(value: float) -> str:
    """A time in seconds with three significant digits, in µs, ms or s."""
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        # By what is shown: 999.6 µs are 1 ms, not 1e+03 µs.
        if value * scale < 999.5:
            return f"{value * scale:.3g} {unit}"
    return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"


def in_bytes(value: float) -> str:
    """Bytes with three significant digits, in kB, MB, GB or TB."""
    for unit, scale in (("kB", 1e-3), ("MB", 1e-6), ("GB", 1e-9)):
        if value * scale < 999.5:
            return f"{value * scale:.3g} {unit}"
    return f"{value * 1e-12:,.3g} TB" if value < 999.5e12 else f"{value * 1e-12:,.0f} TB"


def in_rate(value: float) -> str:
    """Bytes a second; see `in_bytes`."""
    return f"{in_bytes(value)}/s"
