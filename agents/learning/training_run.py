"""The training run of `automap train-agent`: a network is trained on generated problems and evaluated on held-out ones.

An evaluation (*exam*) measures how far the plans that the network proposes are from the best known ones. The results
of all exams of a run are the learning curve.

The folder of a run holds the network (`agent.safetensors`, `agent.json` with the learning curve), its card
(`README.md`), a picture of the curve (`learning-curve.svg`), and in `training/` what is needed to continue the run.
Units: seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.learning.card import write_card
from agents.learning.checkpoint import ABOUT, read_about, write_checkpoint
from agents.learning.dqn import MaskedDQN
from agents.learning.labels import Label, read_labels
from agents.learning.lessons import Exam, lessons
from agents.learning.network import ProposalNetwork
from agents.learning.pretraining import PARAMETERS, train_agent
from agents.learning.problems import VERSION, outline
from automap.errors import ProblemError

EXAMINED = 16
"""Number of held-out problems of an exam; one exam takes half a minute."""
DIGITS = 16
"""Number of digits of a digest that are kept."""
EXAMS = 3
"""Number of exams in a training (assumed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curriculum:
    """The problems that a network learns from, and how they are drawn."""

    labels: Path | None
    """Folder of labels, see `agents.learning.labels`; None = the network learns from its own plans alone."""
    problems: int
    """Without labels, the problems are those of the seeds below this number that are not held out; with labels, the
    labelled ones that are not held out."""
    seed: int
    """Seed of network, replay, exploration and order of the problems."""
    processes: int
    """Number of processes that prepare problems for the one that learns."""


def train(
    folder: Path,
    curriculum: Curriculum,
    *,
    seconds: float,
    command: Sequence[str],
    on_progress: Callable[[str, float], None],
    on_exam: Callable[[str], None],
) -> None:
    """Trains a network, evaluates it, and writes the folder of the run.

    Args:
        folder: made if it does not exist; a training in it that was interrupted is continued.
        curriculum: what it learns on.
        seconds: duration of the training.
        command: command line of the training, noted in the network's description.
        on_progress: called with a text and the share of the training that is done.
        on_exam: called with a text on the results of each exam.

    Raises:
        ProblemError: the folder of labels has none, or the training to continue is damaged.
    """
    seed = curriculum.seed
    labels = _labels(curriculum.labels)
    exam = Exam([label for number, label in sorted(labels.items()) if label.fits and not _trains(number)], EXAMINED)
    training = folder / "training"
    curve: list[dict[str, float]] = []
    if (training / ABOUT).exists():
        curve = read_about(training).get("curve", [])
    about: dict[str, Any] = {
        "command": list(command),
        "seed": seed,
        "generator": VERSION,
        "trained_on": _described(labels, curriculum.problems),
        "digests": _digests(labels),
        "curve": curve,
    }

    def examine(count: int, at_s: float, agent: MaskedDQN) -> None:
        network = ProposalNetwork({name: value.numpy() for name, value in agent.q_net.state_dict().items()})
        grade = exam.grade(network).summary()
        curve.append({"seconds": at_s, "problems": count, **grade})
        on_exam(
            f"after {at_s / 60:.0f} minutes and {count} problems: the first plan is "
            f"{100 * grade['first_mean']:.1f} % above the best known one in the mean, the best one "
            f"{100 * grade['best_mean']:.1f} % ({100 * grade['best_worst']:.1f} % at worst)"
        )

    def report(count: int, at_s: float, agent: MaskedDQN) -> None:
        on_progress(f"{count} problems", at_s / seconds)
        if exam.count and at_s >= len(curve) * seconds / EXAMS:
            examine(count, at_s, agent)

    seeds = [number for number in labels or range(curriculum.problems) if _trains(number)]
    to_learn = lessons(seeds, labels, seed, curriculum.processes)
    agent = train_agent(training, to_learn, seconds=seconds, seed=seed, on_visit=report, about=about)
    if exam.count:
        # The network that is written has an exam of its own, so that the curve ends with it.
        done = read_about(training)
        examine(done["problems"], done["seconds"], agent)
    write_checkpoint(agent, PARAMETERS, folder, about, only_network=True)
    write_card(folder)
    try:
        draw_curve(curve, folder / "learning-curve.svg")
    except ImportError:
        on_exam("no picture of the learning curve: pip install '.[plots]'")


def _labels(folder: Path | None) -> dict[int, Label]:
    """Labels by the seeds of their problems; none without a folder."""
    if folder is None:
        return {}
    labels = read_labels(folder)
    if not labels:
        repair = "Name a folder of `automap label-problems`, or leave it out."
        raise ProblemError("no labels are there", field="labels", value=str(folder), repair=repair)
    return labels


def _trains(number: int) -> bool:
    """Whether the problem of a seed is one to learn from, and not held out."""
    return outline(number).split == "train"


def _digests(labels: Mapping[int, Label]) -> list[str]:
    """Beginnings of the digests of the labelled problems that a network learns from. Whoever measures the network can
    leave these problems out."""
    return sorted(label.digest[:DIGITS] for number, label in labels.items() if label.fits and _trains(number))


def _described(labels: Mapping[int, Label], problems: int) -> str:
    """What a network is trained on, in words."""
    if not labels:
        return f"problems of the split `train` with seeds below {problems}, without a teacher"
    taught = [number for number, label in labels.items() if label.fits and _trains(number)]
    return f"{len(taught)} labelled problems of the split `train`, with seeds from {min(taught)} to {max(taught)}"


def draw_curve(curve: Sequence[dict[str, float]], path: Path) -> None:
    """Draws the grades of the exams over the minutes of training.

    Raises:
        ImportError: matplotlib is not installed; `pip install '.[plots]'` in the folder of AutoMAP does that.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    minutes = [point["seconds"] / 60.0 for point in curve]
    for key, label in (("first_mean", "first plan"), ("best_mean", "best plan")):
        axes.plot(minutes, [100.0 * point[key] for point in curve], marker="o", label=label)
    axes.set(xlabel="minutes of training", ylabel="% above the best known plan, mean", ylim=(0, None))
    axes.set_title("Problems that were held out")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path)
