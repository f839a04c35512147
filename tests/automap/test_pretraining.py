"""Megatron-LM's script for a model, by its attention; the export names it."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from automap.cluster import parse_cluster
from automap.export.export import export
from automap.export.pretraining import Pretraining, Stacks, pretraining_of
from automap.problem import Problem
from automap.space.target_limits import plan_space
from automap.space.templates import templates
from ir import zoo

SIZES = "layers=2,hidden=64,heads=4"
TOKENS = f"{SIZES},seq_len=16,vocab_size=128"
MODELS = {
    f"gpt:{TOKENS}": "pretrain_gpt.py",
    f"llama:{TOKENS}": "pretrain_gpt.py",
    f"bert:{TOKENS}": "pretrain_bert.py",
    f"t5:{TOKENS}": "pretrain_t5.py",
    f"vit:{SIZES}": None,
    # The parts of T5's two layers are alike with heads of this size, and are taken for layers.
    f"t5:{TOKENS},head_size=16": None,
}


def problem_of(model: str) -> Problem:
    training = {"global_batch": 4, "target": "megatron-core"}
    return Problem.build(zoo.build(model), parse_cluster("1x2xA100"), training)


@pytest.mark.parametrize("model", MODELS)
def test_the_script_of_the_command_trains_the_model(model: str) -> None:
    script, problem = MODELS[model], problem_of(model)
    space = plan_space(problem)
    _, values = next(iter(templates(space)))
    found = export(space.decode(values), problem, "megatron-core")
    text = found.files["megatron.sh"]
    command = next(line for line in text.splitlines() if line.startswith("torchrun"))
    shown = f'MODEL_PARALLEL_ARGS=() MODEL_ARGS=(); torchrun() {{ echo "$@"; }}; {command}'
    bare, given = (
        subprocess.run(["bash", "-c", f"{first}; {shown}"], capture_output=True, text=True, check=False)
        for first in ("unset PRETRAIN", "PRETRAIN=mine.py")
    )
    assert shlex.split(given.stdout)[-1] == "mine.py"
    if script is None:
        assert bare.returncode and "names the script that trains this model" in bare.stderr
    else:
        assert shlex.split(bare.stdout)[-1] == script
    (note,) = (note for note in found.notes if note.about == "model")
    assert (script or "Megatron-LM has none for such a model") in note.text
    flags = shlex.split(text.replace("(", " ").replace(")", " "), comments=True)
    assert ("--encoder-num-layers" in flags) == (script == "pretrain_t5.py") != ("--num-layers" in flags)


def test_an_encoder_and_a_decoder_are_counted_apart() -> None:
    graph = zoo.build(f"t5:{TOKENS}")
    space = plan_space(problem_of(f"t5:{TOKENS}"))
    found = pretraining_of(graph, space.evaluator.blocks)
    stacks = Stacks(encoder=2, decoder=2, encoder_length=16, decoder_length=16)
    assert found == Pretraining(script="pretrain_t5.py", stacks=stacks)
