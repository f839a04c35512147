from __future__ import annotations

import pytest

from automap.amounts import in_bytes, in_rate, in_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.14159, "3.14 s"),
        (0.0123, "12.3 ms"),
        (4.2e-6, "4.2 µs"),
        (123456.0, "123,456 s"),
        (float("inf"), "inf s"),
        (0.0, "0 µs"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (9.996e-4, "1 ms"),
        (999.6, "1,000 s"),
    ],
)
def test_times_have_three_significant_digits(value: float, text: str) -> None:
    assert in_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 kB"), (1234.0, "1.23 kB"), (999_600.0, "1 MB"), (65.3e6, "65.3 MB"), (216e9, "216 GB"),
        (999.7e9, "1 TB"), (1.5e12, "1.5 TB"), (1234.6e12, "1,235 TB"),
    ],
)  # fmt: skip
def test_bytes_have_three_figures_and_the_unit_in_which_they_are_shortest(value: float, text: str) -> None:
    assert in_bytes(value) == text
    assert in_rate(value) == f"{text}/s"
