"""Megatron-LM's arguments in a script of the shell: those of the one command that trains.

Which arguments there are is not known here, and what they mean neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from automap.errors import PlanError
from automap.export.shell import commands
from automap.export.shell_conditions import DEFAULT, MAYBE, UNSET, is_known, plain
from automap.export.stated import refuse

_STARTED = (("nproc-per-node", "nnodes"), ("num-gpus", "num-nodes"))
"""Flags of torchrun and of DeepSpeed's launcher for the processes of a host and the number of hosts."""
_LAUNCHER = {"nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "rdzv-backend", "rdzv-endpoint"}
"""Flags of torchrun, where no word ends in .py that would divide them from the trainer's."""
_SLURM = re.compile(r"(?:--nodes|-N|--ntasks-per-node|--gpus-per-node|--gres)(?:=|\s+|(?<=-N))(?:\w+:)*(\d+)(?=\s|$)")
_SLURM_VARIABLES = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "-N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "--gres": ("SLURM_GPUS_ON_NODE",),
}
"""Options of sbatch -> variables that Slurm gives a script (man sbatch)."""
_LISTS = {"recompute-modules", "rampup-batch-size"}
"""Arguments of which several words are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What a script gives to Megatron-LM."""

    flags: Mapping[str, str | None]
    """Arguments by their names without dashes; None = a flag without a value."""
    started: tuple[str, str | None, str | None]
    """Name and value of what says how many processes a host starts, and the number of hosts; None where nothing is."""
    others: tuple[str, ...]
    """What else the trainer gets that only a run could tell, such as what a program prints."""
    defaults: tuple[str, ...]
    """Arguments that are read, and that are defaults of the script, which its environment may change."""


def script_flags(text: str, read: Set[str], switches: Set[str]) -> Script:
    """The arguments of the command of a script that trains.

    Args:
        text: the script.
        read: names of the arguments that are read.
        switches: those of them that have no value.

    Raises:
        PlanError: several commands train, or none does; or an argument that is read is known only where it runs.
    """
    slurm = _slurm(text)
    started, rest = commands(text, slurm)
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
        raise refuse(plain(lost[0]), value, what, "Write a backslash, and nothing behind it, at the end of that line.")
    found = [_arguments(words, read, switches, slurm) for words in trained]
    if read.isdisjoint(found[-1].flags):
        repair = "Give the script that holds them, such as --tensor-model-parallel-size."
        value = " ".join(text.split())[:60] or "nothing"
        raise PlanError("has no arguments of Megatron-LM", field="from", value=value, repair=repair)
    for name, other in ((name, other) for other in found[:-1] for name in sorted(read)):
        one, last = other.flags.get(name, "nothing"), found[-1].flags.get(name, "nothing")
        if one != last:
            what = "differs between commands of the script"
            raise refuse(f"--{name}", f"{one}, {last}", what, "Give a script with one of these commands.")
    return found[-1]


def _slurm(text: str) -> dict[str, str]:
    """What Slurm tells a script, from its lines `#SBATCH`."""
    found: dict[str, str] = {}
    for line in re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE):
        for option in _SLURM.finditer(line):
            found |= dict.fromkeys(_SLURM_VARIABLES[re.split(r"[=\s\d]", option[0])[0]], option[1])
    if {"SLURM_NNODES", "SLURM_NTASKS_PER_NODE"} <= found.keys():
        tasks = str(int(found["SLURM_NNODES"]) * int(found["SLURM_NTASKS_PER_NODE"]))
        found |= {"SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks}
    return found


def _names(words: Sequence[str]) -> Iterator[str]:
    return (re.split("[= ]", plain(word)[2:])[0] for word in words if plain(word).startswith("--"))


def _arguments(words: Sequence[str], read: Set[str], switches: Set[str], slurm: Mapping[str, str]) -> Script:
    """The arguments of a command.

    Args:
        words: its words.
        read: as in `script_flags`.
        switches: as in `script_flags`.
        slurm: as in `_slurm`.

    Raises:
        PlanError: one that is read is known only where the script runs.
    """
    program = next((place for place, word in enumerate(words) if plain(word).endswith(".py")), None)
    launcher = {} if program is None else dict(_pairs(words[:program]))
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
        if name in read and value is not None and DEFAULT in value:
            defaults[f"--{name} {plain(value)}"] = None
        flags[name] = " ".join(map(plain, values)) if name in _LISTS else None if value is None else plain(value)
    each, nodes = _processes(launcher or dict(pairs))
    name = "--nproc-per-node"
    if each is None and "SLURM_NTASKS" in slurm and slurm["SLURM_NTASKS_PER_NODE"] != "1":
        # Without a launcher, Slurm starts each process.
        each, nodes, name = slurm["SLURM_NTASKS_PER_NODE"], slurm["SLURM_NNODES"], "--ntasks-per-node"
    is_launched = {name.replace("_", "-") for name in flags} & _LAUNCHER if program is None else set()
    kept = {name: value for name, value in flags.items() if name.replace("_", "-") not in is_launched}
    return Script(flags=kept, started=(name, each, nodes), others=tuple(others), defaults=tuple(defaults))


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


def _processes(launcher: Mapping[str, Sequence[str]]) -> tuple[str | None, str | None]:
    """Processes of a host and number of hosts; None where only a run could tell, or the environment may change it."""
    said = {plain(name).replace("_", "-"): values[0] for name, values in launcher.items() if values}
    for names in _STARTED:
        if names[0] in said:
            found = [said.get(name, "1") for name in names]
            if all(is_known(value) and DEFAULT not in value for value in found):
                return found[0], found[1]
    return None, None
