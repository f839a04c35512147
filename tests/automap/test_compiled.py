"""Kernels: one stated signature, compiled when first called."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from numba import float64, int64

from automap import jit, kernel_processes
from automap.jit import borrowing, kernel
from automap.kernel_processes import MOST_PROCESSES
from automap.phases import listening
from service import warm_up as warm

EVERYTHING = """
from numba.core import event

class Compiled(event.Listener):
    def on_start(self, happened):
        print("compiled", happened.data["dispatcher"])
    def on_end(self, happened):
        pass

event.register("numba:compile", Compiled())
from agents import search
from agents.searcher import Budget
from automap.cluster import parse_cluster
from automap.problem import Problem
from ir import zoo
from service.command.main import main
problem = Problem.build(zoo.build("bert-large"), parse_cluster("2x2xV100-16GB"), {"global_batch": 16}, {})
search(problem, Budget(evaluations=300), seed=0)
main("inspect zoo:bert-large --cluster 8xA100-80GB --json".split())
main("estimate zoo:bert-large --cluster 8xA100-80GB --global-batch 64 --tp 2 --pp 2 --json".split())
"""


ONE = """
from numba import float64
from automap.jit import borrowing
from automap.phases import listening

@borrowing(float64(float64))
def half(value):
    return value / 2.0

told = []
with listening(told.append):
    assert half(3.0) == 1.5
print([text for text in told if text])
"""


INDICES = """
import numpy as np
from numba import float64, int64
from automap.jit import borrowing

@borrowing(float64(float64[::1], int64))
def at(values, place):
    return values[place]

@borrowing(float64(float64[::1]))
def last(values):
    return values[-1]

values = np.arange(4.0)
assert at(values, 2) == 2.0 and last(values) == 3.0
for place in (-1, 4):
    try:
        at(values, place)
    except IndexError:
        print("refused", place)
"""

SEARCH = """
from agents import search
from agents.searcher import Budget
from automap.cluster import parse_cluster
from automap.problem import Problem
from ir import zoo
for model in ("mixtral-8x7b", "resnet50"):
    problem = Problem.build(zoo.build(model), parse_cluster("2x8xA100-80GB"), {"global_batch": 64}, {})
    assert search(problem, Budget(evaluations=1000), seed=0).plan.estimate.step_time_s > 0.0
unlike = parse_cluster("2xV100-16GB+2xP100-16GB@10Gbit")
problem = Problem.build(zoo.build("gpt:layers=4,hidden=64,heads=4"), unlike, {"global_batch": 16}, {})
assert search(problem, Budget(evaluations=40), seed=0, searcher="piper").plan.estimate.step_time_s > 0.0
"""


APART = """
from numba import float64
from automap.jit import borrowing
from automap.phases import listening

@borrowing(float64(float64), inner=True, apart=True)
def half(value):
    return value / 2.0

@borrowing(float64(float64), inner=True)
def quarter(value):
    return half(half(value))

@borrowing(float64(float64))
def eighth(value):
    return quarter(half(value))

told = []
with listening(told.append):
    assert eighth(24.0) == 3.0
print(len([text for text in told if text]))
"""


@borrowing(float64(float64[::1], int64), inner=True)
def doubled(values, index):
    return 2.0 * values[index]


@borrowing(float64(float64[::1], int64), inner=True)
def tripled(values, index):
    return 3.0 * values[index]


@kernel(float64(float64[::1]))
def total(values):
    copy = values.copy()
    result = 0.0
    for i in range(copy.shape[0]):
        result += doubled(copy, i)
    return result


def test_a_kernel_is_compiled_when_first_called() -> None:
    @borrowing(float64(float64))
    def half(value):
        return value / 2.0

    assert half(3) == 1.5, "the integer becomes the float that is stated"
    assert half(3.0) == 1.5


def test_kernels_call_kernels() -> None:
    assert total(np.array([1.0, 2.5])) == 7.0


@pytest.mark.parametrize("values", [np.array([1, 2]), np.ones((2, 2)), np.ones(4)[::2], [1.0]])
def test_what_is_not_stated_is_refused(values: object) -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        total(values)


def test_a_digest_tells_what_machine_code_depends_on() -> None:
    def made(factor: float, doc: str, inner: object = doubled) -> str:
        def scaled(values, index):  # type: ignore[no-untyped-def]
            return factor * inner(values, index)  # type: ignore[operator]

        scaled.__doc__ = doc
        digest: str = borrowing(float64(float64[::1], int64), inner=True)(scaled).digest
        return digest

    first = made(2.0, "One.")
    assert made(2.0, "Another.") == first, "a docstring compiles nothing again"
    assert made(3.0, "One.") != first
    assert made(2.0, "One.", tripled) != first
    with pytest.raises(TypeError, match="not known"):
        made(2.0, "One.", object())


def test_an_inner_kernel_has_no_entry_from_python() -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        doubled(np.ones(2), 0)


def test_a_compilation_that_nobody_listens_to_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def half(value):  # type: ignore[no-untyped-def]
        return value / 2.0

    half.__module__ = "automap.kernels.never_compiled"
    made = borrowing(float64(float64), inner=True)(half)
    monkeypatch.setattr(jit, "start_others", lambda: None)
    kernel_processes._log_once.cache_clear()
    told: list[str | None] = []
    with listening(told.append), made._telling():
        pass
    assert not caplog.messages
    for _ in range(2):
        with made._telling():
            pass
    assert caplog.messages == told[:1]
    assert re.fullmatch(r"compiling kernels, .*, up to \d+ s on \d free cores?", caplog.messages[0])


@pytest.mark.slow
def test_a_home_that_cannot_be_written_has_its_kernels_kept_elsewhere_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    (tmp_path / "tmp").mkdir()
    home = {**os.environ, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        home.pop(name, None)

    def told() -> str:
        done = subprocess.run([sys.executable, "-c", ONE], env=home, capture_output=True, text=True, check=True)
        return done.stdout

    first = told()
    assert f"compiling kernels, into {tmp_path / 'tmp'}" in first
    assert f"{tmp_path / 'home'}/.cache/automap cannot be written; NUMBA_CACHE_DIR" in first
    assert told() == "[]\n", "it is not compiled again"


@pytest.mark.slow
def test_machine_code_of_before_calls_kernels_apart_that_are_made_anew(tmp_path: Path) -> None:
    def compiled() -> int:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", APART], env=environment, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert compiled() > 0
    assert compiled() == 0
    for kind in ("code", "link"):
        (file,) = tmp_path.glob(f"*/*half-*.{kind}")
        file.unlink()
    assert compiled() == 1, "its caller is read from the cache"


@pytest.mark.slow
def test_waiting_for_another_process_that_compiles_is_told(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", ONE], env=environment, capture_output=True, check=True)
    (code,) = tmp_path.glob("*/*half-*.code")
    code.unlink()
    program = ONE.replace("listening(told.append)", "listening(lambda text: print(text, flush=True))")
    with code.with_suffix(".code-lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE) as waiting:
            assert waiting.stdout is not None
            assert waiting.stdout.readline().startswith(b"compiling kernels")
            assert waiting.poll() is None, "it waits"
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert waiting.wait() == 0


@pytest.mark.slow
def test_other_cores_compile_while_a_process_that_misses_a_kernel_lives(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    program = "from automap.price.kernels.memory import makes_gradients as k; k.load(); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes) as first:  # type: ignore[call-overload]
        assert first.stdout.readline() == b"\n"
        others = psutil.Process(first.pid).children()
        first.kill()
    assert len(others) == min(len(os.sched_getaffinity(0)), MOST_PROCESSES) - 1
    assert not psutil.wait_procs(others, timeout=20)[1], "they do not outlive it"


@pytest.mark.slow
def test_set_up_compiles_all_that_is_called() -> None:
    warm.main()
    done = subprocess.run([sys.executable, "-c", EVERYTHING], capture_output=True, text=True, check=True)
    assert "compiled" not in done.stdout


def checked(program: str, folder: Path) -> list[str]:
    """What a program prints whose kernels check that every index is inside its array."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder), "NUMBA_BOUNDSCHECK": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_indices_that_are_computed_do_not_count_from_the_end(tmp_path: Path) -> None:
    """Kernels do not ask whether they do: -1 would be read as the place before the array."""
    assert checked(INDICES, tmp_path) == ["refused -1", "refused 4"]


@pytest.mark.slow
@pytest.mark.long
def test_a_search_reads_nothing_outside_its_arrays(tmp_path: Path) -> None:
    """All kernels of a search, compiled with checks of every index."""
    checked(SEARCH, tmp_path)
