"""What a plan says of how it is started: every word of it is there, and takes the arguments that it is given."""

import importlib
import json
import math
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from automap.cluster import parse_cluster
from automap.plan import Plan
from automap.price.estimate import annotate
from automap.price.evaluator import Evaluator
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.space.stated_strategy import Strategy, hand_made
from ir import zoo
from service.command.main import main

ROOT = Path(__file__).resolve().parents[2]
SMALL = "gpt:layers=2,hidden=32,heads=2,seq_len=16,vocab_size=256"


def launched(cluster, model=SMALL, **degrees):
    """The plan of a strategy, with how it is started."""
    problem = Problem.build(zoo.build(model), parse_cluster(cluster), {"global_batch": 24, "precision": "fp32"})
    evaluator = Evaluator(problem)
    lowered = hand_made(evaluator, Strategy(**{"micro_batch": 1, **degrees}))
    return annotate(to_plan(lowered, evaluator), lowered, evaluator)


@pytest.mark.parametrize(
    ("cluster", "where"),
    [
        ("2xcpu", "--standalone --nproc-per-node=2"),
        ("3x4xA100", "--nnodes=3 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --nproc-per-node=4"),
        ("2xV100-16GB+4xP100", "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --nproc-per-node=auto"),
    ],
)
def test_each_host_starts_a_process_for_each_of_its_devices(cluster, where):
    assert launched(cluster).launch == f"torchrun {where} examples/train_gpt.py plan.json checkpoint 100"


def test_a_plan_for_another_trainer_is_exported():
    training = {"global_batch": 24, "target": "deepspeed"}
    evaluator = Evaluator(Problem.build(zoo.build(SMALL), parse_cluster("2xA100"), training))
    lowered = hand_made(evaluator, Strategy())
    line = annotate(to_plan(lowered, evaluator), lowered, evaluator).launch
    words = shlex.split(line, comments=True)
    assert words == ["automap", "export", "plan.json", "MODEL", "--target", "deepspeed", "-o", "FOLDER"]
    assert main([*words[1:2], "--help"]) == 0


def test_another_model_needs_a_script_of_the_users_own():
    line = launched("2xcpu", "bert:layers=2,hidden=32,heads=2,seq_len=16,vocab_size=256").launch
    assert shlex.split(line, comments=True) == ["torchrun", "--standalone", "--nproc-per-node=2", "YOUR_TRAINING.py"]
    _, _, said = line.partition("# calls ")
    name, _, page = said.partition(", see ")
    module, _, function = name.rpartition(".")
    assert callable(getattr(importlib.import_module(module), function))
    assert "parallelize(" in (ROOT / page).read_text()


def torchrun(words, folder, path=""):
    """What torchrun prints in a folder, given the words behind its name."""
    done = subprocess.run(
        [sys.executable, str(Path(sysconfig.get_path("scripts")) / "torchrun"), *words],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_what_a_searched_plan_says_starts_its_training(tmp_path):
    """The two commands of examples/train_gpt.py, for a smaller network."""
    problem = ["--cluster", "2xcpu", "--precision", "fp32", "--global-batch", "24"]
    written = ["--budget", "64", "-o", str(tmp_path / "plan.json")]
    assert main(["search", f"zoo:{SMALL}", *problem, "--target", "automap", *written]) == 0
    plan = Plan.from_json(json.loads((tmp_path / "plan.json").read_text()))
    assert plan.search is not None
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    program, *words = shlex.split(plan.launch)
    assert program == "torchrun"
    printed = torchrun(words, tmp_path)
    losses = [float(line.rpartition(" ")[2]) for line in printed.splitlines()]
    assert len(losses) == 11
    assert losses[-1] < losses[0]
    assert (tmp_path / "checkpoint").is_dir()


SCRIPT = """
import copy, json
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from automap.plan import Plan
from automap.runtime.trainer import parallelize

torch.manual_seed(0)
module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("my-llama", num_hidden_layers=4))
ids, labels = torch.randint(64, (2, 8, 16))
one = torch.nn.functional.cross_entropy(copy.deepcopy(module)(ids).logits.flatten(0, 1), labels.flatten()).item()
{page}
# In one piece: torchrun's processes do not buffer what they print, and both print at once.
print("losses " + str(one) + " " + str(loss) + "\\n", end="")
"""
"""A script without a plan, and at {page} the lines of the page."""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_recipe_for_a_script_of_ones_own_runs_as_printed(tmp_path, monkeypatch):
    """From a configuration of transformers to a training, by the commands and the lines of docs/training.md."""
    page = (ROOT / "docs" / "training.md").read_text()
    lines, commands = re.search(r"```python\n(.*?)```.*?```\n(automap export-onnx.*?)```", page, re.DOTALL).groups()
    # So large that two processes are faster than one.
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 64, "max_position_embeddings": 16, "num_hidden_layers": 9}
    (tmp_path / "my-llama").mkdir()
    document = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}
    (tmp_path / "my-llama" / "config.json").write_text(json.dumps(document))
    (tmp_path / "train.py").write_text(SCRIPT.format(page=lines))
    monkeypatch.chdir(tmp_path)
    *searches, last = [shlex.split(line) for line in commands.replace("\\\n", " ").splitlines()]
    for program, *words in searches:
        assert program == "automap"
        assert main(words) == 0
    assert last[0] == "torchrun"
    _, one, plan = re.search(r"(losses) (\S+) (\S+)", torchrun(last[1:], tmp_path)).groups()
    assert math.isclose(float(one), float(plan), rel_tol=1e-5)
    assert (tmp_path / "checkpoint").is_dir()
