"""Launches that go wrong: a typed outcome in time, and no process left."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
from child_processes import living

from automap.runtime.launch.launcher import Limits, launch

LIMITS = Limits(time_s=60, grace_s=0.2)


def tried(folder, limits=LIMITS, should_stop=lambda: False, **what):
    """A launch of two ranks, all of whose processes are gone."""
    argument = {name[-1]: value for name, value in what.items()}
    done = launch("launch_tasks:do", argument, 2, limits, folder, should_stop=should_stop)
    pids = [int(pid) for path in folder.glob("pids-*") for pid in path.read_text().split()]
    gone(pids)
    return done


def gone(pids):
    """Whether processes have ended: for an orphan, whether its new parent has waited for it."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(living(found), timeout=10)
    assert not living(alive)


def test_results_come_back_in_the_order_of_ranks(tmp_path):
    done = tried(tmp_path)
    assert (done.outcome, done.message) == ("ok", "")
    assert done.results == ({"rank": 0, "of": 2}, {"rank": 1, "of": 2})


@pytest.mark.parametrize(
    ("what", "outcome", "message"),
    [
        ({"rank_0": "refuse"}, "refused", "rank 0: PlanError: plan.stages"),
        ({"rank_1": "raise"}, "crashed", "a mistake"),
        ({"rank_1": "kill"}, "crashed", "rank 1: ended by SIGKILL"),
        ({"rank_0": "lost", "rank_1": "kill"}, "crashed", "rank 1: ended by SIGKILL"),
        ({"rank_0": "lost", "rank_1": "hang"}, "peer_lost", "rank 0: RuntimeError: Connection closed"),
        ({"rank_0": "raise", "rank_1": "hang with a child"}, "crashed", "a mistake"),
        ({"rank_0": "leave", "rank_1": "hang"}, "no_result", "rank 0: ended without a result"),
        ({"rank_0": "port"}, "port_in_use", "Address already in use"),
    ],
)
def test_faults_have_types(tmp_path, what, outcome, message):
    done = tried(tmp_path, **what)
    assert done.outcome == outcome
    assert message in done.message
    assert done.time_s < 30


def test_memory_has_a_limit(tmp_path):
    done = tried(tmp_path, replace(LIMITS, memory_bytes=2**29), rank_1="grow")
    assert done.outcome == "out_of_memory", done.message


def test_time_has_a_limit_and_ranks_say_where_they_are(tmp_path):
    done = tried(tmp_path, replace(LIMITS, time_s=1.0), rank_1="hang with a child")
    assert done.outcome == "time_limit"
    assert "in do" in done.message


def test_a_launch_can_be_stopped(tmp_path):
    done = tried(
        tmp_path,
        should_stop=lambda: len(list(tmp_path.glob("pids-*"))) == 2,
        rank_0="hang",
        rank_1="hang with a child",
    )
    assert done.outcome == "stopped"
    assert done.results == ()
    assert done.time_s < 30


def test_ranks_die_with_their_launcher(tmp_path):
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    argument = {"0": "hang", "1": "hang", "ready": str(ready)}
    script = f"from automap.runtime.launch.launcher import *; launch('launch_tasks:do', {argument}, 2, Limits())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # Opened for writing too: what one rank writes and closes is lost if nobody has the pipe open at that moment.
    with ready.open("r+b", buffering=0) as pipe:
        launcher = subprocess.Popen([sys.executable, "-c", script], env=environment)
        said = b""
        try:
            while said.count(b"\n") < 2:
                assert select.select([pipe], [], [], 60)[0], f"two ranks should be ready within 60 s, but only {said}"
                said += pipe.read(100)
        finally:
            launcher.send_signal(signal.SIGKILL)
            launcher.wait()
    gone(map(int, said.split()))
