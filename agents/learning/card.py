"""The card of a network: what it was trained on and how, what it reaches, and for whom it is not.

It is made from the description that a training writes (`agent.json`) and from the limits of the generator, never by
hand, and lies beside the network as `README.md`.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agents.learning.checkpoint import ABOUT, TENSORS
from agents.learning.problems import VERSION
from agents.learning.problems.clusters import LARGE, SMALL_PRIME
from agents.learning.problems.models import OTHERS, TRANSFORMERS, UNSEEN_FAMILIES
from agents.learning.problems.transformers import DEEP
from automap.errors import ProblemError

CARD = "README.md"
_CARD = """\
# A network that plans the training of models

It rates the decisions of which a parallelism plan is made: how many pipeline stages, how many devices share a tensor,
how each operator is split. AutoMAP begins its searches with the plans that it proposes.

- **Network**: a DQN with {num_parameters:,} parameters in layers of {hidden}. It reads {state} features of the plan so
  far and {action} of the action that it rates, whatever the size of model and cluster.
- **Files**: `{tensors}` holds the numbers, `{about}` what is said here, the hyperparameters and the digests of
  the problems. Nothing in them is code.
- **Licence**: Apache-2.0, as AutoMAP itself.

## What it was trained on, and how

{trained_on}.

The problems come from AutoMAP's generator, version {generator}: random models of the families
{families}, with at most {deep} blocks,
on random clusters of at most {large} devices of every kind that AutoMAP knows. No measured time is in the training, and
nobody's model or data.

```
{command}
```

It learns by double Q-learning, and from the decisions of a teacher where there are labels.{took}

## What it reaches

{reached}

## For whom it is not

- It has seen no model of the families {unseen}, none with more than
  {deep} blocks, no cluster of more than {large} devices, and none whose number of devices is a prime above {prime}.
  It plans them too, and is examined on them, but learnt nothing from them.
- It knows AutoMAP's prices, not your hardware: where the price is wrong, the network is wrong alike. Only trials
  (`--trials`) correct it.
- It proposes synchronous training only; local SGD and DaSGD are added to finished plans.
- It is of no use outside AutoMAP: it reads AutoMAP's features, and another version of them is refused.
"""


def write_card(folder: Path) -> None:
    """Writes the card of the network in a folder.

    Raises:
        ProblemError: the network learnt from another version of the generator, whose limits are not known here.
    """
    (folder / CARD).write_text(card(json.loads((folder / ABOUT).read_bytes())), "utf-8")


def card(about: Mapping[str, Any]) -> str:
    """The card of a network as Markdown.

    Args:
        about: description of the network, as `agents.learning.training_run.train` writes it.

    Raises:
        ProblemError: see `write_card`.
    """
    if about["generator"] != VERSION:
        raise ProblemError(
            f"the network learnt from version {about['generator']} of the generator, this program has {VERSION}",
            field="generator",
            value=str(about["generator"]),
            repair="Write the card with the version of AutoMAP that trained the network.",
        )
    network, curve = about["network"], about["curve"]
    state, action = network["state_features"][0], network["action_features"][0]
    widths = [state + action, *network["hidden"], 1]
    took = ""
    if curve:
        minutes, visits = curve[-1]["seconds"] / 60.0, curve[-1]["problems"]
        took = f" The last exam was after {minutes:.0f} minutes and {visits:,} visits to problems."
    return _CARD.format(
        num_parameters=sum((before + 1) * after for before, after in itertools.pairwise(widths)),
        hidden=" and ".join(map(str, network["hidden"])),
        state=state,
        action=action,
        tensors=TENSORS,
        about=ABOUT,
        trained_on=about["trained_on"][:1].upper() + about["trained_on"][1:],
        generator=about["generator"],
        families=", ".join(sorted({*TRANSFORMERS, *OTHERS} - UNSEEN_FAMILIES)),
        unseen=", ".join(sorted(UNSEEN_FAMILIES)),
        deep=DEEP,
        large=LARGE,
        prime=SMALL_PRIME,
        command=shlex.join(about["command"]),
        took=took,
        reached=_reached(curve),
    )


def _reached(curve: Sequence[Mapping[str, float]]) -> str:
    """What the exams say."""
    if not curve:
        return "It was not examined: there were no labels of problems held out of the training."
    rows = ["| | mean | worst |", "|---|---|---|"]
    for exam, grade in (("first", curve[0]), ("last", curve[-1])):
        for key, plans in (("first", "first plan"), ("best", "best plan")):
            mean, worst = 100.0 * grade[f"{key}_mean"], 100.0 * grade[f"{key}_worst"]
            rows.append(f"| {plans}, {exam} exam | {mean:.1f} % | {worst:.1f} % |")
    return "\n".join(
        (
            "How much slower the plans are with which a search begins than the best ones that are known, on problems",
            "held out of the training; most of them are such that its other means leave something to be found:",
            "",
            *rows,
            "",
            "At the first exam it had hardly learnt anything. Below 0, its plans are faster than the label's.",
            "`benchmarks/network_gap.py` examines it on real models.",
        )
    )
