"""The demonstration: three real models through the whole service.

Starts the service on its embedded default, submits ResNet-50, VGG-19 and GPT-2 XL through the Python client over REST,
shows what was found, and proves each plan: valid against the published JSON Schema, read back, priced again to the
same figure. GPT-2 XL is exported in a process of its own while the first two are searched.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema

from automap.errors import ModelError, UserError
from automap.plan import Plan, check_model
from ir import lifetime
from service import processes
from service.client import AutomapClient
from service.command.estimation import own_problem
from service.command.output import write_plan
from service.command.terminal import progress_line, show_job
from service.jobs.run_job import JobRequest, ModelOptions
from service.problems import RemoteError, problem
from service.report import summary

ROOT = Path(__file__).resolve().parents[2]
EXPORT_TIMEOUT_S = 180.0
"""Seconds that the export of a model may take (assumed)."""


class Case(NamedTuple):
    """One model of the demonstration."""

    name: str
    cluster: str
    training: dict[str, Any]
    about: str
    load: Callable[[], bytes]


def run_demo(folder: Path, *, budget: str = "25s", seed: int = 0) -> int:
    """Runs the demonstration.

    Args:
        folder: gets `<model>/plan.json` and `service.log`.
        budget: budget of each search.
        seed: seed of each search.

    Returns:
        0 if every plan passed, else 1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began, failures = time.monotonic(), 0
    with _exporting(folder / "gpt2-xl") as gpt2_xl, started_service(folder / "service.log") as url:
        say(f"The service runs at {url} (private Redis, one worker); its log is {folder / 'service.log'}.")
        with AutomapClient(url) as client:
            for case in _cases(gpt2_xl):
                try:
                    _run_case(client, case, folder / case.name, budget=budget, seed=seed)
                except (UserError, RemoteError, AssertionError, jsonschema.ValidationError) as fault:
                    failures += 1
                    say(line_of("FAILED", str(fault)))
    verdict = "Every plan passed." if not failures else f"{failures} of 3 failed."
    say(f"\n{verdict} {time.monotonic() - began:.0f} s in all.")
    return 1 if failures else 0


def say(text: str) -> None:
    """Prints a line at once, also into a pipe."""
    print(text, flush=True)


def line_of(label: str, text: str) -> str:
    """A line of what is shown of a model: a label, and what it says."""
    return f"  {label:8} {text}"


LIGHT = {
    "resnet50": "512 images a step: 32 a GPU, the size of the original ImageNet runs",
    "vgg19": "512 images a step, 144 M parameters behind 25 Gbit: communication decides",
}
"""Name of a model that ships in the onnx wheel -> what its case is about."""


def _cases(gpt2_xl: Callable[[], bytes]) -> list[Case]:
    cluster, training = "2x8xV100-16GB@25Gbit", {"global_batch": 512, "optimizer": "momentum"}
    cases = [Case(name, cluster, training, about, partial(light_model, name)) for name, about in LIGHT.items()]
    about = "512 sequences of 1024 tokens a step: the half million tokens that GPT-2 was trained with"
    training = {"global_batch": 512, "optimizer": "adam"}
    return [*cases, Case("gpt2-xl", "4x8xA100-80GB", training, about, gpt2_xl)]


def _run_case(client: AutomapClient, case: Case, folder: Path, *, budget: str, seed: int) -> None:
    data = case.load()
    model = client.upload_model(data, name=case.name)
    parameters = model["summary"]["num_parameters"] / 1e6
    say(f"\n{case.name}: {parameters:,.1f} M parameters, {len(data) / 1e3:,.0f} kB of ONNX, on {case.cluster}")
    say(f"  ({case.about})")
    job = client.submit(model["id"], case.cluster, case.training, budget=budget, seed=seed, name=case.name)
    with progress_line(case.name) as show:
        client.wait(job["id"], on_progress=lambda job: show_job(show, job), every_s=0.25)
    plan = client.plan(job["id"])
    for label, text in summary(plan):
        say(line_of(label, text))
    path = folder / "plan.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(plan, path)
    _prove(path, client.plan_schema(), data, case)
    say(line_of("plan", f"{path}: valid, read back, priced again to the same figure"))


def _prove(path: Path, schema: dict[str, Any], data: bytes, case: Case) -> None:
    """Checks the written plan, away from the service that made it."""
    from automap.price.estimate import price

    document = json.loads(path.read_text("utf-8"))
    jsonschema.Draft202012Validator(schema).validate(document)
    plan = Plan.from_json(document)
    request = JobRequest(cluster=None, training={}, model=ModelOptions(name=case.name))
    problem_here = own_problem(data, request, plan)
    check_model(plan, problem_here)
    again = price(problem_here, plan)
    stated = plan.estimate
    assert stated is not None, "the plan has no estimate"
    assert again.step_time_s == stated.step_time_s, f"priced again: {again.step_time_s} s, not {stated.step_time_s} s"
    assert again.memory_bytes == stated.memory_bytes, "priced again, the memory differs"
    assert again.fits, "the plan does not fit into memory"


def light_model(name: str) -> bytes:
    """A model that ships in the onnx wheel: its graph, with weights that say only their shapes."""
    spec = importlib.util.find_spec("onnx")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "backend" / "test" / "data" / "light" / f"light_{name}.onnx"
        if path.is_file():
            return path.read_bytes()
    raise ModelError("not in the onnx package", field="model", value=name, repair="Install onnx 1.21 or newer.")


@contextlib.contextmanager
def _exporting(folder: Path) -> Iterator[Callable[[], bytes]]:
    """Exports GPT-2 XL beside what runs in the block; the function it gives waits for the file."""
    source = ROOT / "examples" / "gpt2.py"
    if not source.is_file():
        repair = "Clone it and run `make demo`."
        raise ModelError(
            "the demonstration needs a checkout of the repository", field="model", value=str(source), repair=repair
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    child = subprocess.Popen(
        _command(signal.SIGKILL, "export-onnx", f"{source}:gpt2_xl", "-o", str(path), "--name", "gpt2-xl"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )

    def load() -> bytes:
        try:
            _, complaint = child.communicate(timeout=EXPORT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RemoteError(problem(0, "The export took too long")) from None
        if child.returncode != 0:
            raise RemoteError(problem(0, "The export failed", complaint.decode(errors="replace")[-2000:]))
        return path.read_bytes()

    try:
        yield load
    finally:
        child.kill()
        child.wait()
        if child.stderr is not None:
            child.stderr.close()


@contextlib.contextmanager
def started_service(log: Path) -> Iterator[str]:
    """Runs the service on a free port with a data folder of its own; gives its URL."""
    with tempfile.TemporaryDirectory(prefix="automap-demo-") as data, log.open("wb") as errors:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("AUTOMAP_")}
        child = subprocess.Popen(
            _command(signal.SIGTERM, "serve", "--port", "0", "--json"),
            env={**environment, "AUTOMAP_DATA_DIR": data, "AUTOMAP_LOG_LEVEL": "INFO"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            process_group=0,  # Ctrl-C reaches the demonstration, which then ends the service in order
        )
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            if not line:
                raise RemoteError(problem(0, "The service did not start", f"See {log}."))
            yield str(json.loads(line)["url"])
        finally:
            processes.stop(child, grace_s=30.0)
            if child.stdout is not None:
                child.stdout.close()


def _command(sig: signal.Signals, *words: str) -> list[str]:
    """The command line of a command of AutoMAP that gets `sig` when this process ends."""
    return lifetime.command(sig, [sys.executable, "-m", "service.command", *words])
