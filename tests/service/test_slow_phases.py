"""What takes long is named on stderr, and nothing else is."""

import threading

import pytest

from automap.phases import listening, phase
from service import slow_phases
from service.slow_phases import SlowPhases


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines so far; waiting for one is `until`."""
    lines: list[str] = []
    monkeypatch.setattr(slow_phases.typer, "echo", lambda text, file: lines.append(text) or spoken.set())
    spoken.clear()
    return lines


spoken = threading.Event()


def test_a_slow_phase_is_named(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_phases, "SLOW_S", 0.0)
    with listening(SlowPhases()), phase("reading the model"):
        assert spoken.wait(20.0)
    assert len(said) == 1
    assert "reading the model" in said[0]


def test_a_quick_phase_is_not(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_phases, "SLOW_S", 1000.0)
    with listening(SlowPhases()) as _, phase("a"), phase("b"):
        pass
    assert not said


def test_many_short_phases_of_one_text_are_one_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernels are, which are compiled one by one."""
    delays: list[float] = []
    clock = iter([0.0, 0.0, 2.0, 2.0, 2.0, 4.0])

    class Timer:
        daemon = False

        def __init__(self, delay: float, function: object) -> None:
            delays.append(delay)

        def start(self) -> None: ...

        def cancel(self) -> None: ...

    monkeypatch.setattr(slow_phases.threading, "Timer", Timer)
    monkeypatch.setattr(slow_phases.time, "monotonic", lambda: next(clock))
    with listening(SlowPhases()):
        for _ in range(2):
            with phase("compiling"):
                pass
    # The first timer is that of nothing.
    assert delays[1:] == [3.0, 1.0]


def test_a_failure_ends_its_phase(said: list[str]) -> None:
    heard: list[str | None] = []
    with listening(heard.append), pytest.raises(ValueError, match="no"), phase("a"):
        raise ValueError("no")
    assert heard == ["a", None]
    with phase("b"):
        pass
    assert heard == ["a", None]
