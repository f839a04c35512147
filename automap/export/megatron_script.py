"""Finds Megatron-LM's arguments in a shell script: those of the one command that trains.

This module does not know which arguments exist or what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from automap.errors import PlanError
from automap.export.script_processes import Started, processes, slurm_variables
from automap.export.shell import commands
from automap.export.shell_conditions import DEFAULT, MAYBE, UNSET, is_known, plain
from automap.export.stated import refuse

_LAUNCHER = {
    "standalone", "nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "rdzv-backend",
    "rdzv-endpoint",
}  # fmt: skip
"""Flags of torchrun, where no word ends in .py that would divide them from the trainer's."""
_TRANSFORMERS = {"per_device_train_batch_size", "model_name_or_path", "gradient_checkpointing"}
"""Arguments of transformers' `TrainingArguments` and of its example scripts."""
_LISTS = {"recompute-modules", "rampup-batch-size"}
"""Arguments of which several words are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """The arguments that a script gives to Megatron-LM."""

    flags: Mapping[str, str | None]
    """Arguments by their names without dashes; None = a flag without a value."""
    started: Started
    others: tuple[str, ...]
    """Further arguments whose values are known only when the script runs, such as the output of a program."""
    defaults: tuple[str, ...]
    """Arguments whose values are defaults of the script, which environment variables may change."""
    documents: tuple[str, ...]
    """Texts that the script writes to files."""


def script_flags(text: str, read: Set[str], switches: Set[str]) -> Script:
    """The arguments of the command of a script that trains.

    Args:
        text: the script.
        read: names of the arguments that are read.
        switches: those of them that have no value.

    Raises:
        PlanError: several commands train, or none does; or an argument that is read is known only where it runs.
    """
    slurm = slurm_variables(text)
    started, rest, documents = commands(text, slurm)
    trained = [words for words in started if not read.isdisjoint(_names(words))]
    bare = [words for words in started if words[0].startswith("--")]
    lost = next((words for words in bare if words in trained), None)
    if lost is None and not trained:
        trained = [rest]
    elif all(words in bare for words in trained):
        # A file of arguments, without the command.
        trained = [[word for words in bare for word in words]]
    elif lost is not None:
        what = "begins a command of its own: before it, a comment stands or the backslash at a line's end is missing"
        value = " ".join(map(plain, lost[1:2])) or "set"
        raise refuse(plain(lost[0]), value, what, "Write a backslash, and nothing after it, at the end of that line.")
    found = [_arguments(words, read, switches, _started(words, started, slurm), documents) for words in trained]
    _check_kind(found[-1].flags)
    if read.isdisjoint(found[-1].flags):
        raise _without_arguments(text, started)
    for name, other in ((name, other) for other in found[:-1] for name in sorted(read)):
        one, last = other.flags.get(name, "nothing"), found[-1].flags.get(name, "nothing")
        if one != last:
            what = "differs between commands of the script"
            raise refuse(f"--{name}", f"{one}, {last}", what, "Give a script with one of these commands.")
    return found[-1]


def _without_arguments(text: str, started: Sequence[Sequence[str]]) -> PlanError:
    """The error for a script of another trainer, which names the trainer's file where the script does."""
    words = [plain(word) for command in started for word in command]
    files = [word.rpartition("=")[2] for word in words if re.fullmatch(r"\S+\.(toml|ya?ml|json)", word)]
    repair = "Give the script that holds them, such as --tensor-model-parallel-size."
    if files:
        repair = (
            f"Give the file of the trainer that it starts, {files[0]}, in which the script's own settings stand too."
        )
    value = " ".join(text.split())[:60] or "nothing"
    return PlanError("has no arguments of Megatron-LM", field="from", value=value, repair=repair)


def _names(words: Sequence[str]) -> Iterator[str]:
    return (re.split("[= ]", plain(word)[2:])[0] for word in words if plain(word).startswith("--"))


def _check_kind(flags: Mapping[str, str | None]) -> None:
    """Refuses a command with arguments of transformers: some have the names of Megatron-LM's, and mean other things."""
    for name, value in flags.items():
        if name.replace("-", "_") in _TRANSFORMERS:
            repair = "Give DeepSpeed's JSON or accelerate's YAML with a training_arguments.json beside it."
            raise refuse(
                f"--{name}", value or "set", "is an argument of transformers, whose scripts cannot be read", repair
            )


def _program(words: Sequence[str]) -> int | None:
    """Place of the program in a command; None where no word ends in .py."""
    return next((place for place, word in enumerate(words) if plain(word).endswith(".py")), None)


def _started(words: Sequence[str], started: Sequence[Sequence[str]], slurm: Mapping[str, str]) -> Started:
    """How many processes a command is run in.

    Args:
        words: its words.
        started: all commands of its script; one of them may run it as a script of its own.
        slurm: as in `slurm_variables`.
    """
    program = _program(words)
    launcher = dict(_pairs(words[:program])) or dict(_pairs(words[program or 0 :]))
    around = [] if program is None else [one for one in started if any(words[program] in word for word in one[1:])]
    return processes(launcher, [words[:program], *around], slurm)


def _arguments(
    words: Sequence[str], read: Set[str], switches: Set[str], started: Started, documents: Sequence[str]
) -> Script:
    """The arguments of a command.

    Args:
        words: its words.
        read: as in `script_flags`.
        switches: as in `script_flags`.
        started: how many processes it is run in.
        documents: texts that its script writes.

    Raises:
        PlanError: one that is read is known only where the script runs.
    """
    program = _program(words)
    pairs, others = list(_pairs(words[(program or 0) :])), []
    flags: dict[str, str | None] = {}
    defaults: dict[str, None] = {}
    for word, given in pairs:
        name = plain(word)
        values = [] if name in switches else given
        value = values[0] if values else None
        if not is_known(word):
            raise refuse(f"--{name}", value or "set", "is an argument whose name is not known", "Write its name out.")
        if name.partition(" ")[0] in read and " " in name:
            what = "is one word with its value, which Megatron-LM does not read"
            raise refuse(f"--{name.partition(' ')[0]}", name, what, "Write no quotes around the two.")
        others += [
            plain(extra) for extra in given[len(values[:1]) :] if not is_known(extra) and not UNSET.fullmatch(extra)
        ]
        if name in read and (MAYBE in word or not all(map(is_known, values[:1]))):
            what = "is known only where the script runs" if MAYBE not in word else "depends on a condition"
            repair = "Write it as a number or a word, or set its variables in the script."
            shown = "set" if value is None else plain(value)
            raise refuse(f"--{name}", shown, what, repair)
        if name in read and name not in _LISTS and len(values) > 1 and all(map(is_known, values)):
            raise refuse(f"--{name}", " ".join(map(plain, values)), "has several values", "Give one of them.")
        if name in read and value is not None and DEFAULT in value:
            defaults[f"--{name} {plain(value)}"] = None
        flags[name] = " ".join(map(plain, values)) if name in _LISTS else None if value is None else plain(value)
    is_launched = {name.replace("_", "-") for name in flags} & _LAUNCHER if program is None else set()
    kept = {name: value for name, value in flags.items() if name.replace("_", "-") not in is_launched}
    return Script(
        flags=kept, started=started, others=tuple(others), defaults=tuple(defaults), documents=tuple(documents)
    )


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Names of flags without dashes, with their marks, and the words up to the next one."""
    name, values = "", list[str]()
    for word in words:
        shown = plain(word)
        if shown.startswith("--") and shown != "--":
            if name:
                yield name, values
            bare, equals, value = word.replace("--", "", 1).partition("=")
            name, values = bare, [value] if equals else []
        elif shown.strip():
            values.append(word)
    if name:
        yield name, values
