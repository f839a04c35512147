"""Folders that hold no checkpoint, or not the one of this network, are refused by name."""

import contextlib
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import partly_reached
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runtime_ranks import expert_plan, make_problem
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from automap.errors import UserError
from automap.runtime.mesh_groups import Axis
from automap.runtime.trainer import graph_trainer
from automap.runtime.trainer.checkpoint import Checkpoint, _replace, read, write
from automap.runtime.trainer.graph_checkpoint import GraphCheckpoint
from automap.runtime.trainer.graph_trainer import GraphTrainer, Whole
from automap.runtime.trainer.module_tree import tied_names
from automap.runtime.trainer.roles import Roles
from automap.runtime.trainer.supported_plans import FinerThanModules
from ir.graph import Tensor


@pytest.fixture(scope="module", autouse=True)
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def state(**more):
    return {"model.weight": torch.zeros(4), "more": {"step": 0}, **more}


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "checkpoint", state() | {"model.weight": torch.arange(4.0), "more": {"step": 3}})
    return tmp_path / "checkpoint"


def test_what_was_written_is_read(folder):
    found = state()
    read(folder, found)
    assert found["model.weight"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert found["more"] == {"step": 3}


def cut(path):
    path.write_bytes(path.read_bytes()[:50])


@pytest.mark.parametrize(
    ("damage", "wanted", "word"),
    [
        (lambda folder: folder.rename(folder.with_name("elsewhere")), state, "No such file"),
        (lambda folder: (folder / ".metadata").unlink(), state, "No such file"),
        (lambda folder: cut(folder / ".metadata"), state, "metadata read failed"),
        (lambda folder: cut(folder / "__0_0.distcp"), state, "EOFError, a file ends too early"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), state, "No such file"),
        (
            lambda folder: None,
            lambda: state(**{"optimizer.weight.exp_avg": torch.zeros(4)}),
            "optimizer.weight.exp_avg",
        ),
        (lambda folder: None, lambda: state() | {"model.weight": torch.zeros(5)}, "Size mismatch"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_an_error_with_a_repair(folder, damage, wanted, word, caplog):
    damage(folder)
    with pytest.raises(UserError, match="no checkpoint that this network and optimizer can read") as fault:
        read(folder, wanted())
    assert word in str(fault.value)
    assert (fault.value.field, fault.value.value) == ("folder", str(folder))
    assert fault.value.repair
    if not (folder / ".metadata").exists():
        assert not caplog.records, "torch writes no traces where there is no checkpoint"


def test_a_folder_that_cannot_be_written_is_an_error_with_a_repair(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written there: process 0 says NotADirectoryError") as fault:
        write(tmp_path / "file" / "checkpoint", state())
    assert (fault.value.field, fault.value.value) == ("folder", str(tmp_path / "file" / "checkpoint"))

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(UserError, match=r"process 0 says OSError, .*No space left on device"):
        write(tmp_path / "checkpoint", state())
    assert not list(tmp_path.glob("checkpoint*")), "a part stays on the full disk"


def train(network, optimizer):
    network(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def checkpoint_of(network):
    axis = Axis(name="", number=0, size=1, index=0, group=None)
    return Checkpoint(network, Roles(), tied_names(network), axis, None, torch.device("cpu"), network.state_dict(), {})


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.SGD])
def test_a_checkpoint_from_before_the_first_step_is_read(tmp_path, kind):
    network = torch.nn.Linear(3, 2)
    optimizer = kind(network.parameters(), lr=0.1)
    checkpoint = checkpoint_of(network)
    checkpoint.save(tmp_path / "first", optimizer, {"step": 0})
    train(network, optimizer)
    wanted = network.weight.detach().clone()
    train(network, optimizer)
    assert checkpoint.load(tmp_path / "first", optimizer, {"step": 7}) == {"step": 0}
    assert not optimizer.state
    train(network, optimizer)
    torch.testing.assert_close(network.weight.detach(), wanted, rtol=0.0, atol=0.0)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_weights_are_read_by_torch_alone_as_the_documentation_says(tmp_path, monkeypatch):
    """The network has a weight that two layers share, and running statistics."""
    torch.manual_seed(0)

    def build():
        layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
        layers[2].weight = layers[0].weight
        return layers

    network, module = build(), build()
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    checkpoint_of(network).save(tmp_path / "checkpoint", optimizer, {"step": 1})
    text = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    (code,) = re.findall(r"^```python\n(dcp_to_torch_save.*?)^```$", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {"dcp_to_torch_save": dcp_to_torch_save, "torch": torch, "module": module})
    torch.testing.assert_close(module.state_dict(), network.state_dict())


def graph_checkpoint(held):
    """The checkpoint of a graph of which this process has the parts `held`, half of each weight."""
    executor = SimpleNamespace(
        parameters=held,
        members={name: [name] for name in held},
        device=torch.device("cpu"),
        wholes=lambda parts: {n: torch.cat([x, x]) if x.dim() else x for n, x in parts.items()},
        own=lambda wholes: {n: x[:2] if x.dim() else x for n, x in wholes.items()},
    )
    whole = (2 * len(held["weight"]), *held["weight"].shape[1:])
    shapes = {name: whole if value.dim() else () for name, value in held.items()}
    tensors = {n: Tensor(name=n, shape=shape, dtype="float32", role="parameter") for n, shape in shapes.items()}
    graph = SimpleNamespace(pieces={}, tensors=tensors)
    masters = SimpleNamespace(masters=list(held.values()))
    return GraphCheckpoint(graph, {}, {0: executor}, masters, {}, held)


def parts(optimizer, **settings):
    """Halves of a weight and a parameter of one number, which the optimizer has changed once."""
    held = {"weight": torch.ones(2, 3), "scale": torch.tensor(2.0)}
    made = optimizer([value.requires_grad_() for value in held.values()], **settings)
    for value in held.values():
        value.grad = torch.ones_like(value)
    made.step()
    return held, made


def test_parts_of_a_graph_are_written_whole_beside_a_parameter_of_one_number():
    """Its moments have no dims, as counts of steps have none."""
    held, optimizer = parts(torch.optim.AdamW)
    found = graph_checkpoint(held)._tensors(optimizer)
    assert {name: tuple(x.shape) for name, x in found.items() if name.startswith("optimizer.")} == {
        f"optimizer.{name}.{key}": shape if key != "step" else ()
        for name, shape in (("weight", (4, 3)), ("scale", ()))
        for key in ("exp_avg", "exp_avg_sq", "step")
    }


class Counting(torch.optim.Optimizer):
    """Steps that become shorter, by a plain number that it counts them with."""

    def __init__(self, parameters, lr=1.0):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    held = self.state[parameter]
                    held["steps"] = held.get("steps", 0) + 1
                    held["kept"] = None
                    parameter.sub_(parameter.grad, alpha=group["lr"] / held["steps"])


def test_plain_numbers_of_an_optimizer_are_read_again(tmp_path):
    network = nn.Linear(3, 2)
    optimizer = Counting(network.parameters())
    for _ in range(3):
        train(network, optimizer)
    checkpoint_of(network).save(tmp_path / "third", optimizer, {})
    other = nn.Linear(3, 2)
    fresh = Counting(other.parameters())
    checkpoint_of(other).load(tmp_path / "third", fresh, {})
    assert [(type(kept["steps"]), kept["steps"]) for kept in fresh.state.values()] == [(int, 3)] * 2
    torch.testing.assert_close(other.state_dict(), network.state_dict())


def test_plain_numbers_of_an_optimizer_are_read_again_where_a_graph_is_trained(tmp_path):
    held, optimizer = parts(Counting)
    optimizer.step()
    graph_checkpoint(held).save(tmp_path / "second", optimizer, {})
    other, fresh = parts(Counting)
    graph_checkpoint(other).load(tmp_path / "second", fresh, {})
    assert [(type(kept["steps"]), kept["steps"]) for kept in fresh.state.values()] == [(int, 2)] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_states_that_no_checkpoint_can_hold_are_refused_by_name(tmp_path):
    """Rows and columns of parts of weights, in one place for all ranks, and values that are no numbers."""
    held, optimizer = parts(torch.optim.Adafactor)
    with pytest.raises(UserError, match="has a part of the weight") as refused:
        graph_checkpoint(held).save(tmp_path / "factors", optimizer, {})
    assert (refused.value.field, refused.value.value) == ("optimizer.state.row_var", "(2, 1)")
    network = nn.Linear(3, 2)
    optimizer = Counting(network.parameters())
    train(network, optimizer)
    optimizer.state[network.bias]["kept"] = []
    with pytest.raises(UserError, match="no other values") as refused:
        checkpoint_of(network).save(tmp_path / "lists", optimizer, {})
    assert (refused.value.field, refused.value.value) == ("optimizer.state.kept", "list")


def test_weights_are_those_of_the_network_where_a_graph_computes_in_a_short_format(tmp_path):
    """The optimizer changes float32 copies, which do not begin with rounded numbers."""
    module, graph = partly_reached.network().float(), partly_reached.graph()
    wanted = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    plan = expert_plan(make_problem(graph, 1, partly_reached.BATCH, precision="bf16"), count=1)
    finer = FinerThanModules("", field="", value=0, repair="")
    with mock.patch.object(graph_trainer, "_check_code"), mock.patch.object(graph_trainer, "_check_scores"):
        trainer = GraphTrainer(module, plan, graph, Whole.of(module, graph), finer)
    trainer.save(tmp_path / "first", torch.optim.SGD(trainer.parameters(), lr=0.1), step=0)
    found = {f"model.{name}": torch.full_like(value, torch.nan) for name, value in wanted.items()}
    dcp.load(found, checkpoint_id=tmp_path / "first")
    for name, value in wanted.items():
        assert torch.equal(found[f"model.{name}"], value), name


def test_a_checkpoint_of_a_deeper_network_is_refused_by_name(tmp_path):
    """What it has beside the weights that are read would be left out without a word."""
    deep, flat = (
        nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))),
        nn.Sequential(*(nn.Linear(3, 3) for _ in range(2))),
    )
    checkpoint_of(deep).save(tmp_path / "deep", torch.optim.SGD(deep.parameters(), lr=0.1), {})
    with pytest.raises(UserError, match=r"holds 2\.bias and 3 more, which this one lacks") as refused:
        checkpoint_of(flat).load(tmp_path / "deep", torch.optim.SGD(flat.parameters(), lr=0.1), {})
    assert refused.value.field == "folder"
    tied = nn.Sequential(deep[0], deep[1])
    tied[1].weight = tied[0].weight
    checkpoint_of(flat).save(tmp_path / "untied", torch.optim.SGD(flat.parameters(), lr=0.1), {})
    with pytest.raises(UserError, match=r"holds 1\.weight, which this one lacks"):
        checkpoint_of(tied).load(tmp_path / "untied", torch.optim.SGD(tied.parameters(), lr=0.1), {})


@pytest.mark.parametrize(("call", "number"), [("rename", 1), ("rename", 2), ("rmtree", 1), ("rmtree", 2)])
def test_one_checkpoint_is_complete_whenever_the_replacing_of_one_ends(tmp_path, monkeypatch, call, number):
    """It ends as if the process were killed, before a change of folders."""
    place, fresh, left = tmp_path / "checkpoint", tmp_path / "checkpoint.writing", [number]
    for step, folder in enumerate((place, fresh)):
        write(folder, state() | {"more": {"step": step}})
    owner = Path if call == "rename" else shutil
    function = getattr(owner, call)

    def ending(*args, **kwargs):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(owner, call, ending)
        _replace(place, fresh)
    before = place.with_name("checkpoint.before")
    assert any((folder / ".metadata").exists() for folder in (place, before))
    if not place.exists():
        with pytest.raises(UserError, match=r"checkpoint\.before is there, which was to be replaced"):
            read(place, state())
    write(place, state() | {"more": {"step": 3}})
    found = state()
    read(place, found)
    assert found["more"] == {"step": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
