"""The whole service as real processes: server, private Redis, worker, work horse."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from child_processes import called, living
from long_cases import long_but

from automap.cluster import LOCAL, parse_cluster
from automap.errors import NothingFits, UserError
from service.command.main import main
from service.problems import RemoteError

pytestmark = pytest.mark.slow

TRAINING = {"global_batch": 64}
CLUSTER = "8xV100-16GB"
CANCEL_S = 10.0
"""Within which a cancelled job has no process left; far less than the job would run. `make chaos` measures it."""


@pytest.fixture(scope="module")
def squeezenet(light: Callable[[str], bytes]) -> bytes:
    return light("squeezenet")


def submit(service: Any, model: bytes, budget: str, searchers: Sequence[str] = ("random",)) -> str:
    uploaded = service.client.upload_model(model, name="squeezenet")
    job = service.client.submit(uploaded["id"], CLUSTER, TRAINING, budget=budget, searchers=searchers)
    return str(job["id"])


def horse(service: Any, until: Any) -> psutil.Process:
    """The process that runs the job."""
    found: psutil.Process = until(lambda: service.worker().children())[0]
    return found


def is_running(service: Any, job_id: str, until: Any) -> None:
    until(lambda: service.client.job(job_id)["progress"])
    assert service.client.job(job_id)["state"] == "running"


def test_submit_poll_plan(running: Any, squeezenet: bytes, until: Any) -> None:
    seen: list[float] = []
    job_id = submit(running, squeezenet, "1s")
    job = running.client.wait(job_id, on_progress=lambda j: seen.append((j["progress"] or {}).get("fraction", 0)))
    assert job["attempt"] == 1
    assert seen == sorted(seen)
    plan = running.client.plan(job_id)
    assert plan.model.name == "squeezenet"
    assert plan.estimate is not None
    assert plan.estimate.fits


def test_the_command_line_against_a_service(
    running: Any, squeezenet: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(squeezenet)
    at = ["--url", running.url]
    words = [
        "--cluster",
        CLUSTER,
        "--global-batch",
        "64",
        "--budget",
        "1s",
        "--searcher",
        "expert",
        "--searcher",
        "mcmc",
    ]
    assert main(["submit", str(path), *words, *at, "--detach", "--priority", "3"]) == 0
    job_id = capsys.readouterr().out.strip()
    assert running.client.job(job_id)["request"]["priority"] == 3
    assert main(["watch", job_id, "-o", str(tmp_path / "plan.json"), *at]) == 0
    assert capsys.readouterr().out.startswith("strategy")
    assert (tmp_path / "plan.json").exists()
    assert main(["plan", job_id, "--json", *at]) == 0
    assert main(["status", job_id, *at]) == 0
    assert main(["status", *at]) == 0
    assert "succeeded" in capsys.readouterr().out
    assert main(["cancel", job_id, *at]) == 0  # has ended: stays as it is
    assert "succeeded" in capsys.readouterr().out
    assert main(["status", "unknown", *at]) == 2


def test_a_job_of_several_searchers(running: Any, squeezenet: bytes) -> None:
    model = running.client.upload_model(squeezenet)["id"]
    names = ["random", "mcmc", "expert"]
    searched = []
    for searchers in (names, names, ["mcmc"]):
        budget = 300 if len(searchers) == 3 else 100
        job = running.client.submit(model, CLUSTER, TRAINING, budget=budget, searchers=searchers, tie=0, seed=5)
        assert running.client.wait(job["id"])["request"]["searchers"] == searchers
        searched.append(running.client.plan(job["id"]))
    first, second, alone = (plan.search for plan in searched)
    assert replace(first, seconds=None) == replace(second, seconds=None)
    assert list(first.searchers) == names
    assert first.searchers["mcmc"] == alone.searchers["mcmc"]
    assert searched[0].estimate.step_time_s == min(first.searchers.values()) == first.searchers[first.found_by]


def test_a_running_job_is_cancelled_at_once(running: Any, squeezenet: bytes, until: Any) -> None:
    job_id = submit(running, squeezenet, "60s", searchers=["random", "mcmc"])
    is_running(running, job_id, until)
    child = horse(running, until)
    assert running.client.cancel(job_id)["state"] == "cancelled"
    until(lambda: not child.is_running(), deadline_s=CANCEL_S)
    with pytest.raises(RemoteError, match="cancelled"):
        running.client.wait(job_id)
    job_id = submit(running, squeezenet, "1s")
    assert running.client.wait(job_id)["state"] == "succeeded"


def ranks(service: Any) -> list[psutil.Process]:
    """Processes of trials."""
    return called("automap.runtime.launch.rank", service.children())


def test_trials_in_processes_of_their_own(running: Any, until: Any) -> None:
    model = "zoo:gpt:layers=2,hidden=128,heads=2,seq_len=128,vocab_size=64"  # 1,000 steps take most of a minute
    here = {**parse_cluster("2xV100-16GB").to_json(), "name": LOCAL}
    training = {"global_batch": 8, "precision": "fp32"}
    client, asked = running.client, {"budget": 100, "searchers": ["mcmc"], "hints": {"fix": {"dp": 2}}}

    job = client.submit(model, here, training, **asked, trials={"top_k": 2, "steps": 1000})
    processes = until(lambda: found if len(found := ranks(running)) == 2 else None)
    folder = Path(next(word for word in processes[0].cmdline() if "automap-ranks-" in word))
    client.cancel(job["id"])
    until(lambda: not living(processes), deadline_s=CANCEL_S)
    until(lambda: not folder.parent.exists(), deadline_s=CANCEL_S)

    job = client.submit(model, here, training, **asked, trials={"top_k": 1, "steps": 2})
    seen = []
    client.wait(job["id"], on_progress=lambda j: seen.append((j["progress"] or {}).get("searcher")), every_s=0.1)
    plan = client.plan(job["id"])
    (trial,) = plan.search.trials
    assert (trial.outcome, trial.message) == ("ok", "")
    assert plan.measured == {"outcome": "ok", **trial.measured}
    ratio = trial.measured["step_time_s"] / plan.estimate.step_time_s
    assert (plan.search.calibration.factor, plan.search.calibration.spread) == (pytest.approx(ratio), 1.0)
    assert "trial 1 of 1" in seen
    assert not ranks(running)


def test_a_job_that_cannot_be_solved_fails_with_its_reason(running: Any, light: Callable[[str], bytes]) -> None:
    model = running.client.upload_model(light("vgg19"))
    hints = {"memory_reserve_bytes": 15.9 * 2**30}
    job = running.client.submit(model["id"], CLUSTER, TRAINING, budget="1s", searchers=["random"], hints=hints)
    with pytest.raises(NothingFits):
        running.client.wait(job["id"])
    assert running.client.job(job["id"])["state"] == "failed"


def test_a_batch_that_no_plan_divides(running: Any, squeezenet: bytes) -> None:
    model = running.client.upload_model(squeezenet)
    with pytest.raises(UserError) as fault:
        job = running.client.submit(model["id"], CLUSTER, {"global_batch": 7}, budget="1s", hints={"fix": {"dp": 8}})
        running.client.wait(job["id"])
    assert fault.value.repair


def test_a_killed_work_horse_is_replaced(running: Any, squeezenet: bytes, until: Any) -> None:
    job_id = submit(running, squeezenet, "4s")
    is_running(running, job_id, until)
    horse(running, until).kill()
    job = running.client.wait(job_id, timeout_s=60)
    assert (job["state"], job["attempt"]) == ("succeeded", 2)


def test_a_killed_worker_is_replaced_and_its_job_runs_again(running: Any, squeezenet: bytes, until: Any) -> None:
    job_id = submit(running, squeezenet, "4s")
    is_running(running, job_id, until)
    child, worker = horse(running, until), running.worker()
    worker.kill()
    until(lambda: not living([child]), deadline_s=5)
    job = running.client.wait(job_id, timeout_s=90)
    assert (job["state"], job["attempt"]) == ("succeeded", 2)
    assert running.worker().pid != worker.pid


@pytest.mark.parametrize("sig", long_but([signal.SIGKILL], [signal.SIGTERM, signal.SIGKILL]))
def test_accepted_jobs_survive_a_restart(
    sig: signal.Signals, start: Callable[..., Any], squeezenet: bytes, until: Any, tmp_path: Path
) -> None:
    service = start()
    first = submit(service, squeezenet, "3s")
    second = submit(service, squeezenet, "1s")
    is_running(service, first, until)
    service.stop(sig)  # checks that no process is left
    service = start()
    job = service.client.wait(first, timeout_s=60)
    assert (job["state"], job["attempt"]) == ("succeeded", 2)
    assert service.client.wait(second, timeout_s=60)["state"] == "succeeded"


def test_a_killed_redis_is_started_again(start: Callable[..., Any], squeezenet: bytes, until: Any) -> None:
    service = start("--workers", "0")
    job_id = submit(service, squeezenet, "1s")
    server = called("redis-server", service.children())[0]
    server.kill()

    def state() -> Any:
        try:
            return service.client.job(job_id)["state"]
        except RemoteError as fault:
            assert fault.status == 503
            return None

    assert until(state) == "queued"


def test_deaths_of_redis_are_no_deaths_of_the_job(start: Callable[..., Any], squeezenet: bytes, until: Any) -> None:
    service = start()
    job_id = submit(service, squeezenet, "4s")
    is_running(service, job_id, until)
    killed: set[int] = set()

    def another_dies() -> bool:
        """A server that ends by itself, because its port is still taken, is none that was killed."""
        for server in called("redis-server", service.children()):
            if server.pid not in killed:
                killed.add(server.pid)
                with contextlib.suppress(psutil.NoSuchProcess):
                    server.kill()
                    return True
        return False

    for _ in range(3):
        until(another_dies)

    def job() -> Any:
        try:
            found = service.client.job(job_id)
        except RemoteError as fault:
            assert fault.status == 503
            return None
        return found if found["state"] not in ("queued", "running") else None

    ended = until(job, deadline_s=60)
    assert (ended["state"], ended["attempt"]) == ("succeeded", 1)


def test_ctrl_c_leaves_nothing(start: Callable[..., Any]) -> None:
    service = start()
    # Jobs in the background of a shell ignore Ctrl-C until the server listens to signals: it does once it answers.
    service.client.version()
    service.stop(signal.SIGINT)
    assert service.process.returncode == 0


def test_workers_elsewhere_share_a_redis(
    start: Callable[..., Any], redis_url: str, squeezenet: bytes, until: Any, tmp_path: Path
) -> None:
    # Two services on one Redis stand for two machines: one takes jobs, the other runs them.
    front = start("--workers", "0", data_dir=tmp_path / "a", AUTOMAP_REDIS_URL=redis_url)
    job_id = submit(front, squeezenet, "1s")
    start("--workers", "1", data_dir=tmp_path / "b", AUTOMAP_REDIS_URL=redis_url)
    assert front.client.wait(job_id, timeout_s=60)["state"] == "succeeded"
