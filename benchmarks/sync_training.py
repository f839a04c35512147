"""A small language model trained for real on two processes under each sync mode: final loss, and time on a slow link.

    python benchmarks/sync_training.py [--steps 120] [--seeds 3] [--timed 12]

A decoder of a million parameters learns the characters of Python's own help topics. A plan with two replicas runs it on
two processes of one thread each, with gloo between them. With one seed, all modes have the same initial values and the
same order of the text. The loss is that of the averaged model on text that was kept back from training. DaSGD averages
every four steps with the corrected merge at delays 1 to 4. Then all-reduces of parameters or gradients are made to
begin late, in a thread of their own, and steps are timed.

The losses are within noise if their mean over the seeds is off by no more than twice the standard deviation of the
seeds under synchronous training. The exit status is 1 if they are not, or if DaSGD's steps grow by half of the link's
delay over its period or more.
"""

import argparse
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pydoc_data.topics import topics

import torch
import torch.distributed as dist

from automap.cluster import parse_cluster
from automap.plan import Plan, Sync
from automap.price.evaluator import Evaluator
from automap.problem import Problem
from automap.records import from_json, to_json
from automap.runtime.executor.optimizer import Optimizer
from automap.runtime.executor.runner import join, replicas_of
from automap.runtime.executor.stage_executor import loss_scale
from automap.runtime.executor.synthetic_data import RandomValues
from automap.runtime.launch.launcher import Limits, launch
from automap.runtime.mesh_groups import Groups, meet
from automap.runtime.operators.apply import run
from automap.space.space import PlanSpace
from automap.space.templates import megatron_signatures
from ir import zoo

TOKENS, BATCH = 32, 8
SPEC = f"gpt:layers=2,hidden=208,heads=4,seq_len={TOKENS},vocab_size=128"
SEEDS, STEPS, PERIOD = 3, 120, 4
KEPT_BACK, ROWS = 0.1, 128
"""Share of the text that is kept back from training, and number of its samples that are evaluated."""
LATE_S, WARM, TIMED = (0.0, 0.05, 0.1, 0.15), 4, 12
LARGE = 1000
"""Least number of elements of an all-reduce that is one of parameters or gradients."""
MODES = {
    "synchronous": Sync(),
    "local SGD, period 4": Sync(kind="local_sgd", period=PERIOD),
    **{f"DaSGD, period 4, delay {d}": Sync(kind="dasgd", period=PERIOD, delay=d) for d in (1, 2, 3, 4)},
}
TIMED_MODES = ("synchronous", "local SGD, period 4", "DaSGD, period 4, delay 4")


def problem_of() -> Problem:
    """The model on two devices."""
    training = {"global_batch": BATCH, "precision": "fp32", "sync_modes": ["synchronous", "local_sgd", "dasgd"]}
    return Problem.build(zoo.build(SPEC), parse_cluster("2xA100"), training)


def plan_of(problem: Problem) -> Plan:
    """The plan of two replicas under a sync mode."""
    space = PlanSpace(problem)
    shape = next(s for s in space.shapes if s.replicas == 2 and s.num_micro_batches == 1)
    prefix = space.even_values(shape, recompute="none", zero=0)
    return space.decode(megatron_signatures(space, shape, prefix, sequence_parallel=False, expert_axis=""))


class Text:
    """Samples of the help topics."""

    def __init__(self) -> None:
        characters = "\n".join(topics[name] for name in sorted(topics))
        self.ids = torch.tensor([min(ord(c), 127) for c in characters])
        self.num_trained = int((1.0 - KEPT_BACK) * len(self.ids))

    def samples(self, count: int, generator: torch.Generator, *, kept_back: bool) -> dict[str, torch.Tensor]:
        """`count` random samples of one of the two parts of the text."""
        low, high = (self.num_trained, len(self.ids)) if kept_back else (0, self.num_trained)
        starts = torch.randint(low, high - TOKENS - 1, (count, 1), generator=generator)
        rows = self.ids[starts + torch.arange(TOKENS + 1)]
        return {"ids": rows[:, :-1], "labels": rows[:, 1:]}


class LateLink:
    """A replacement of `torch.distributed.all_reduce` in which large ones begin late, in a thread of their own."""

    def __init__(self) -> None:
        self.late_s = 0.0
        self._thread = ThreadPoolExecutor(1)
        self._all_reduce = dist.all_reduce

    def __call__(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if tensor.numel() < LARGE or self.late_s == 0.0:
            return self._all_reduce(tensor, op, group, async_op)
        under_way = self._thread.submit(self._late, tensor, op, group)
        if async_op:
            return Handle(under_way)
        return under_way.result()

    def _late(self, tensor, op, group):
        time.sleep(self.late_s)
        self._all_reduce(tensor, op, group)


class Handle:
    """The handle of an all-reduce that runs in the thread."""

    def __init__(self, under_way):
        self._under_way = under_way

    def wait(self):
        self._under_way.result()


class Trained:
    """The model on one rank under one mode."""

    def __init__(self, evaluator: Evaluator, plan: Plan, text: Text, groups: Groups, seed: int) -> None:
        graph = evaluator.problem.graph
        self._graph, self._text = graph, text
        values = RandomValues(graph, seed)
        self._values = dict(values.items())
        self._pipeline, self._executors = join(evaluator, plan, dist.get_rank(), values, groups)
        self._optimizer = Optimizer(self._executors[0].parameters, "adam")
        self._replicas = replicas_of(plan, self._executors, self._optimizer.masters)
        self._generator = torch.Generator().manual_seed(seed)

    def step(self) -> None:
        """Runs one training step."""
        rows = self._text.samples(BATCH, self._generator, kept_back=False)
        self._pipeline.step(lambda name, box, _: rows[name][tuple(slice(*span) for span in box)])
        self._optimizer.step()
        if self._replicas is not None:
            self._replicas.after_step()

    def finish(self) -> None:
        """Averages the replicas."""
        if self._replicas is not None:
            self._replicas.finish()

    @torch.no_grad()
    def loss(self) -> float:
        """Loss on the text that was kept back."""
        rows = self._text.samples(ROWS, torch.Generator().manual_seed(0), kept_back=True)
        values = {**self._values, **self._executors[0].whole_parameters(), **rows}
        found = run(self._graph, values, ROWS)[self._graph.outputs[-1]]
        return float(found.sum() * loss_scale(self._graph, 1, ROWS))


def train(folder, rank, num_ranks, argument):
    """The work of one rank; returns {losses: {mode: [seeds]}, seconds: {mode: [late]}}."""
    torch.set_num_threads(1)
    meet(folder, rank, num_ranks, torch.device("cpu"), limit_s=60.0)
    link = dist.all_reduce = LateLink()
    problem, text, groups = problem_of(), Text(), Groups()
    evaluator, plan = Evaluator(problem), Plan.from_json(argument["plan"])
    plans = {name: replace(plan, sync=from_json(Sync, sync, path="sync")) for name, sync in argument["modes"].items()}
    losses = {name: [] for name in plans}
    for seed in range(argument["seeds"]):
        for name, mine in plans.items():
            model = Trained(evaluator, mine, text, groups, seed)
            for _ in range(argument["steps"]):
                model.step()
            model.finish()
            losses[name].append(model.loss() if rank == 0 else 0.0)
            dist.barrier()
    seconds = {name: [] for name in TIMED_MODES}
    for link.late_s in LATE_S:
        for name in TIMED_MODES:
            model = Trained(evaluator, plans[name], text, groups, 0)
            for _ in range(WARM):
                model.step()
            dist.barrier()
            began = time.perf_counter()
            for _ in range(argument["timed"]):
                model.step()
            dist.barrier()
            seconds[name].append((time.perf_counter() - began) / argument["timed"])
            model.finish()
    return {"losses": losses, "seconds": seconds}


def main() -> int:
    """Trains, prints both tables and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of training")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds, two or more")
    parser.add_argument("--timed", type=int, default=TIMED, help="steps that are timed")
    argument = vars(parser.parse_args())
    problem, began = problem_of(), time.monotonic()
    modes = {name: to_json(sync) for name, sync in MODES.items()}
    done = launch(
        "sync_training:train", {**argument, "plan": plan_of(problem).to_json(), "modes": modes}, 2, Limits(time_s=1800)
    )
    if done.outcome != "ok":
        print(done.outcome, done.message)
        return 1
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(
        f"{SPEC}: {problem.graph.num_parameters:,} parameters; 2 replicas, {BATCH} samples of {TOKENS} characters a "
        f"step, {argument['steps']} steps of Adam, {argument['seeds']} seeds; {time.monotonic() - began:.0f} s"
    )
    losses, seconds = done.results[0]["losses"], done.results[0]["seconds"]
    plain = losses["synchronous"]
    noise = statistics.stdev(plain)
    print(f"\n{'loss on text kept back':28}{'mean':>8}{'seeds':>28}{'off synchronous':>18}")
    worst = 0.0
    for name, found in losses.items():
        off = statistics.fmean(found) - statistics.fmean(plain)
        worst = max(worst, abs(off)) if name.startswith("DaSGD") else worst
        each = "  ".join(f"{x:.4f}" for x in found)
        print(f"{name:28}{statistics.fmean(found):8.4f}{each:>28}{off:+18.4f}")
    calm = worst <= 2.0 * noise
    print(f"seeds differ by {noise:.4f} (standard deviation); DaSGD is off by at most {worst:.4f}")
    print(
        f"\n{'ms a step, link late by':28}" + "".join(f"{late * 1e3:8.0f} ms" for late in LATE_S) + f"{'grown by':>12}"
    )
    for name, found in seconds.items():
        grown = (found[-1] - found[0]) * 1e3
        print(f"{name:28}" + "".join(f"{x * 1e3:11.1f}" for x in found) + f"{grown:12.1f}")
    last = seconds["DaSGD, period 4, delay 4"]
    flat = last[-1] - last[0] < 0.5 * LATE_S[-1] / PERIOD
    print(f"loss within noise: {'yes' if calm else 'no'}; steps of DaSGD flat: {'yes' if flat else 'no'}")
    return int(not (calm and flat))


if __name__ == "__main__":
    raise SystemExit(main())
