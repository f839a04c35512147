"""How many processes a script of the shell starts: by torchrun, DeepSpeed's launcher, srun, mpirun, or Slurm alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from automap.export.shell_conditions import DEFAULT, is_known, plain

Started: TypeAlias = tuple[str, str | None, str | None]
"""Name and value of the setting that states the processes of a host, and the number of hosts; None where it is not
stated. Without a number of hosts, the value is the number of all processes."""
_LAUNCHERS = (("nproc-per-node", "nnodes"), ("num-gpus", "num-nodes"))
"""Flags of torchrun and of DeepSpeed's launcher for the processes of a host and the number of hosts."""
_SBATCH = re.compile(
    r"(?:--nodes|-N|--ntasks|-n|--ntasks-per-node|--gpus-per-node|--gres)(?:=|\s+|(?<=-[Nn]))(?:\w+:)*(\d+)(?=\s|$)"
)
_VARIABLES = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "-N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "-n": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "--gres": ("SLURM_GPUS_ON_NODE",),
}
"""Options of sbatch -> variables that Slurm gives a script (man sbatch)."""
_SRUN = {
    "-N": "nodes", "--nodes": "nodes", "-n": "ntasks", "--ntasks": "ntasks", "--ntasks-per-node": "ntasks-per-node",
}  # fmt: skip
_MPIRUN = {"-np": "ntasks", "--np": "ntasks", "-n": "ntasks"}
_STEPS: Mapping[str, Mapping[str, str]] = {"srun": _SRUN, "mpirun": _MPIRUN, "mpiexec": _MPIRUN}
"""Program that starts processes -> its options that say how many."""


def slurm_variables(text: str) -> dict[str, str]:
    """What Slurm tells a script, from its lines `#SBATCH`."""
    found: dict[str, str] = {}
    for line in _header(text):
        for option in _SBATCH.finditer(line):
            found |= dict.fromkeys(_VARIABLES[re.split(r"[=\s\d]", option[0])[0]], option[1])
    if {"SLURM_NNODES", "SLURM_NTASKS_PER_NODE"} <= found.keys() and "SLURM_NTASKS" not in found:
        tasks = str(int(found["SLURM_NNODES"]) * int(found["SLURM_NTASKS_PER_NODE"]))
        found |= {"SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks}
    return found


def _header(text: str) -> Iterator[str]:
    """What stands after `#SBATCH`, up to the first command, where Slurm stops reading. A script within a script begins
    with `#!`."""
    is_header = True
    for line in text.splitlines():
        if line.startswith("#!"):
            is_header = True
        elif line.strip() and not line.startswith("#"):
            is_header = False
        if is_header and line.startswith("#SBATCH"):
            yield line.removeprefix("#SBATCH")


def processes(
    launcher: Mapping[str, Sequence[str]], before: Sequence[Sequence[str]], slurm: Mapping[str, str]
) -> Started:
    """The number of processes of a command, if the script states it and environment variables cannot change it.

    Args:
        launcher: flags of the launcher without dashes, with their values.
        before: words in front of the program, and the words of commands that run the command as a script.
        slurm: as in `slurm_variables`.
    """
    said = {plain(name).replace("_", "-"): values[0] for name, values in launcher.items() if values}
    for each, nodes in _LAUNCHERS:
        if each in said:
            number, hosts = said[each], said.get(nodes, "1")
            return (f"--{each}", number, hosts) if _are_sure([number, hosts]) else (f"--{each}", None, None)
    own: dict[str, str] = {}
    for words in before:
        own = own or _options(words)
    return _tasks(own, slurm)


def _are_sure(values: Sequence[str]) -> bool:
    """Whether the script says these values, and nothing but the script."""
    return all(is_known(value) and DEFAULT not in value for value in values)


def _options(words: Sequence[str]) -> dict[str, str]:
    """Options of the first program that starts processes, by their long names."""
    names = [plain(word).rpartition("/")[2] for word in words]
    begin = next((at for at, name in enumerate(names) if name in _STEPS), None)
    if begin is None:
        return {}
    known, found = _STEPS[names[begin]], dict[str, str]()
    for at, word in enumerate(words[begin + 1 :], begin + 1):
        name, equals, value = word.partition("=")
        if name in known:
            found[known[name]] = value if equals else "".join(words[at + 1 : at + 2])
        elif word[:2] in known and word[2:].isdecimal():
            found[known[word[:2]]] = word[2:]
    return found


def _tasks(own: Mapping[str, str], slurm: Mapping[str, str]) -> Started:
    """The processes that Slurm or MPI starts. One on each host is none of them: it starts the others.

    Args:
        own: options of srun or mpirun.
        slurm: as in `slurm_variables`.
    """
    nodes = own.get("nodes", slurm.get("SLURM_NNODES"))
    each, tasks = own.get("ntasks-per-node"), own.get("ntasks")
    name = "--ntasks-per-node" if tasks is None and (each or "SLURM_NTASKS_PER_NODE" in slurm) else "--ntasks"
    if tasks is None and each is not None:
        is_sure = nodes is not None and _are_sure([each, nodes])
        tasks = str(int(each) * int(nodes or 1)) if is_sure and f"{each}{nodes}".isdecimal() else None
    elif tasks is None and nodes == slurm.get("SLURM_NNODES"):
        # On other hosts than those of the job, versions of Slurm start different numbers.
        tasks = slurm.get("SLURM_NTASKS")
    return name, None if tasks is None or tasks == (nodes or "1") or not _are_sure([tasks]) else tasks, None
