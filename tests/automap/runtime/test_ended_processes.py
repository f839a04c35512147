"""A process of a training that ends is named by those that are left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from long_cases import long_but
from redis_servers import free_port

from automap.errors import PlanError
from automap.runtime.trainer import ended_processes
from automap.runtime.trainer.ended_processes import ProcessLost, naming_the_ended

SCRIPT = """
import os, signal, sys
import torch.distributed as dist
from automap.runtime.trainer import parallelize
sys.path.append({tests!r})
import partly_reached
from runtime_ranks import expert_plan, make_problem

plan = expert_plan(make_problem(partly_reached.graph(), 2, partly_reached.BATCH), count=2)
trainer = parallelize(partly_reached.network(), plan, partly_reached.graph())
for step in range(2):
    if step and dist.get_rank() == 1:
        {end}
    trainer.step(*(x[trainer.rows] for x in partly_reached.batch(step)))
"""
RAISES = ("raise ValueError('no sample 17')", "by ValueError: no sample 17")
KILLED = ("os.kill(os.getpid(), signal.SIGKILL)", "by SIGKILL")
CASES = [RAISES, KILLED, ("sys.exit(3)", "with exit code 3")]


@pytest.mark.slow
@pytest.mark.parametrize(("end", "how"), long_but(CASES[:2], CASES))
def test_the_others_say_who_has_ended(tmp_path: Path, end: str, how: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[2]), end=end))
    # Without torchrun, which may end the others before they have said what they saw.
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, said = ranks[0].communicate(timeout=300)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].returncode == 1
    assert f"ProcessLost: process 1 has ended {how}; process 0 lost its connection to it" in said


@pytest.mark.parametrize("kind", [RuntimeError, PlanError])
def test_a_connection_that_is_lost_in_the_set_up_is_no_fault_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """A network that is run to be looked at may end by it."""
    about = {"field": "module", "value": 0, "repair": ""} if kind is PlanError else {}

    @naming_the_ended
    def run(words: str, cause: str = "") -> None:
        raise kind(words, **about) from RuntimeError(cause)

    with pytest.raises(kind, match="reset by peer"):
        run("Connection reset by peer")
    monkeypatch.setattr(ended_processes.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(ended_processes.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(ended_processes, "ended", lambda: "process 0 has ended by SIGKILL")
    with pytest.raises(ProcessLost, match="process 0 has ended by SIGKILL; process 1 lost its connection"):
        run("Connection reset by peer")
    with pytest.raises(ProcessLost, match="process 0 has ended by SIGKILL"):
        run("Failed to run stage backward", "Broken pipe")  # As torch's pipelines say it.
    with pytest.raises(kind, match="wrong shape"):
        run("wrong shape", "more dims")
