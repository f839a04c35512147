"""Trains an nn.Module by the plan in pytorch.json beside this file. It needs torch alone; start it with torchrun.

training = Training(model, loss)  # every process builds the same model; loss(outputs, labels) is a mean
optimizer = torch.optim.AdamW(training.parameters(), lr=3e-4)
loss = training.step(inputs, labels)  # an equal share of the samples for each of `training.replicas`
optimizer.step()
optimizer.zero_grad()
"""

import inspect
import json
import linecache
import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as CsvSchedule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

STYLES = {style.__name__: style for style in (ColwiseParallel, RowwiseParallel)}
LAYOUTS = {"Replicate": Replicate(), "Shard": Shard(-1)}


class Training:
    """A network that is trained by the plan.

    Attributes:
        stages: the modules that this process holds; parameters keep the names of the model.
        replicas, replica: number of the shares that a global batch is divided into, and which one is this process's.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[[Any, Tensor], Tensor], folder: Path = Path(__file__).parent
    ) -> None:
        self.plan, self.loss = json.loads((folder / "pytorch.json").read_bytes()), loss
        self._check(model)
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = init_device_mesh(kind, self.plan["mesh"]["shape"], mesh_dim_names=self.plan["mesh"]["dim_names"])
        if (planned := mesh.size()) != (started := dist.get_world_size()):
            raise ValueError(f"the plan is for {planned} processes, and torchrun started {started}; start {planned}")
        check_alike(model)
        self.device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.plan["precision"] == "tf32"
        sides = [mesh["replicate"], mesh["shard"]]
        self.replicas = sides[0].size() * sides[1].size()
        self.replica = sides[0].get_local_rank() * sides[1].size() + sides[1].get_local_rank()
        self.samples = self.plan["global_batch"] // self.replicas
        self.pipe, here, number = mesh["pipe"].get_group(), mesh["pipe"].get_local_rank(), len(self.plan["stages"])
        tied = shared_names(model)
        self.reached = Reached(model, self.device)
        every = [model]
        if number > 1:  # the file is written for pipelines alone
            given = model, self.plan["stages"], self.plan["inputs"], self.device, loss
            every, loss = import_module("plan_stages").cut(*given)
        inputs = [given["name"] for given in self.plan["inputs"]]
        self.names = inputs if set(inputs) <= set(inspect.signature(model.forward).parameters) else []
        mine = list(range(here, number, mesh["pipe"].size()))
        self.tied = []
        for names in tied:
            ranks = {n % mesh["pipe"].size() for n, stage in enumerate(every) if names & parameter_names(stage)}
            if here in ranks and len(ranks) > 1:
                self.tied.append((names, ranks - {here}))
        self.stages = [every[n].to(self.device) for n in mine]
        for stage in self.stages:
            self._parallelize(stage, mesh, tied)
        self.is_last = number - 1 in mine
        self.schedule: Any = None
        if number > 1:
            parts = [PipelineStage(every[n], n, number, self.device, group=self.pipe) for n in mine]
            schedule: Any = CsvSchedule
            self.schedule = schedule(parts, n_microbatches=self.plan["num_micro_batches"], loss_fn=loss)
            self.schedule._load_csv(str(folder / "schedule.csv"))
        # A script seeds all processes alike to build one model. Those that split the same layers must go on so.
        seed = torch.tensor(torch.initial_seed() % 2**62 + 1 + dist.get_rank(), device=self.device)
        dist.broadcast(seed, group=mesh["tensor"].get_group(), group_src=0)
        seed_all(int(seed))

    def _check(self, model: nn.Module) -> None:
        known = dict(model.named_modules())
        named = [*self.plan["layers"], *self.plan["recompute"], *(p for stage in self.plan["stages"] for p in stage)]
        missing = [path for path in named if path not in known]
        missing += [glob for glob in self.plan["tensor_parallel"] if not any(matches(path, glob) for path in known)]
        if missing:
            raise ValueError(f"the model has no module {missing[0]} of pytorch.json; give the model of the plan")
        check_recomputed(known, self.plan["recompute"])

    def _parallelize(self, stage: nn.Module, mesh: DeviceMesh, tied: Sequence[set[str]]) -> None:
        """Splits modules, marks layers to be computed again, and spreads parameters over the replicas."""
        modules, plan = dict(stage.named_modules()), self.plan
        styles = dict[str, Any]()
        for glob, split in plan["tensor_parallel"].items():
            for path, module in modules.items():
                if matches(path, glob):
                    layouts = {name: LAYOUTS[value] for name, value in split.items() if name.endswith("layouts")}
                    style = STYLES[split["style"]](**layouts, use_local_output=split["use_local_output"])
                    check_class(module, path)
                    styles[path] = Transposed(style) if is_transposed(module) else style
                    for parameter in module.parameters() if split["pieces"] else ():
                        order = interleaved(split["pieces"], mesh["tensor"].size())
                        parameter.data = parameter.data[..., order] if is_transposed(module) else parameter.data[order]
        if styles:
            parallelize_module(stage, mesh["tensor"], styles)
        for path in {path.rpartition(".")[0] for path in styles}:
            code = stage.get_submodule(path)
            code.forward = partial(run_split, code.forward, path or "the model", mesh["tensor"].size())
        named = dict(stage.named_parameters(remove_duplicate=False))
        for names in tied:
            first, *others = sorted(names & named.keys(), key=lambda n: not isinstance(named[n], DTensor)) or [""]
            for owner, _, leaf in (other.rpartition(".") for other in others):
                stage.get_submodule(owner).register_parameter(leaf, named[first])
        for path in plan["recompute"]:
            if path in modules:
                modules[path].forward = partial(checkpoint, modules[path].forward, use_reentrant=False)
        narrow: Any = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        policy = MixedPrecisionPolicy(**(narrow if plan["precision"] == "bf16" else {}))
        data = mesh["shard"] if mesh["replicate"].size() == 1 else mesh["replicate", "shard"]
        layers = [part for path in plan["layers"] if path in modules for part in called_parts(modules[path])]
        for part in (*layers, stage):
            fully_shard(part, mesh=data, reshard_after_forward=plan["zero"] == 3, mp_policy=policy)
        self.reached.watch(stage)
        StandIns(stage, layers)

    def parameters(self) -> list[dict[str, list[nn.Parameter]]]:
        """Parameter groups for an optimizer, one for each mesh of parameters."""
        groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
        for parameter in dict.fromkeys(p for stage in self.stages for p in stage.parameters()):
            groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        return [{"params": some} for some in groups.values()]

    def step(self, *data: Tensor) -> float:
        """Forward and backward passes of all micro-batches; returns the loss of the global batch.

        Args:
            data: inputs of the model in the order of pytorch.json, then the labels: the samples of this replica.

        Raises:
            ValueError: there are fewer or more samples, so that the losses of replicas would not weigh alike, or an
                input of a pipeline has another shape than in the plan.
        """
        for number, some in enumerate(data):
            if len(some) != self.samples:
                name = "labels" if number == len(data) - 1 else f"input {number}"
                share = f"{self.samples} of the {self.plan['global_batch']} of a global batch"
                where = f"each of the {self.replicas} replicas takes {share}"
                repair = "Leave a smaller last batch out: DataLoader(..., drop_last=True)."
                raise ValueError(f"{name}: {len(some)} samples, where {where}. {repair}")
        *inputs, labels = (some.to(self.device) for some in data)
        if self.schedule is not None:
            self._check_inputs(inputs)
        with loss_parallel() if self.plan["loss_parallel"] else nullcontext():
            losses = self._run(inputs, labels)
        for names, peers in self.tied:
            self._exchange(names, peers)
        found = sum(float(local(loss).detach()) for loss in losses) / max(1, len(losses))
        total = torch.cat([torch.tensor([found, float(bool(losses))], device=self.device), self.reached.own()])
        dist.all_reduce(total)
        self.reached.forget(total[2:].tolist())
        return float(total[0] / total[1])

    def _check_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Refuses inputs of a pipeline for which its stages were not made."""
        found = [list(some.shape[1:]) for some in inputs]
        wanted = {given["name"]: given["shape"][1:] for given in self.plan["inputs"]}
        if found != list(wanted.values()):
            repair = "Give inputs of these shapes, or search with a model that was exported with yours."
            raise ValueError(f"the stages are made for samples with the shapes {wanted}, and got {found}. {repair}")

    def _run(self, inputs: Sequence[Tensor], labels: Tensor) -> list[Tensor]:
        """The losses of the micro-batches, on the last stage."""
        losses, number = list[Tensor](), self.plan["num_micro_batches"]
        if self.schedule is not None:
            target = {"target": labels, "losses": losses} if self.is_last else {}
            given = {f"input_{number}": some for number, some in enumerate(inputs)}
            self.schedule.step(**given, **target, return_outputs=False)
            return losses
        (stage,) = self.stages
        pieces = zip(*(some.chunk(number) for some in (*inputs, labels)), strict=True)
        for count, (*some, those) in enumerate(pieces, 1):
            assert isinstance(stage, FSDPModule)
            stage.set_is_last_backward(count == number)
            stage.set_requires_gradient_sync(count == number or self.plan["zero"] > 1)
            stage.set_requires_all_reduce(count == number)
            stage.set_reshard_after_backward(count == number or self.plan["zero"] == 3)
            named = dict(zip(self.names, some, strict=True)) if len(some) == len(self.names) else {}
            losses.append(self.loss(stage(**named) if named else stage(*some), those))
            (losses[-1] / number).backward()
        return losses

    def _exchange(self, names: set[str], peers: set[int]) -> None:
        """Adds up the gradients of a parameter that several pipeline ranks hold."""
        (found,) = {p for s in self.stages for n, p in s.named_parameters(remove_duplicate=False) if n in names}
        if not found.requires_grad:
            return  # alike in all stages
        assert found.grad is not None
        mine = local(found.grad)
        sent, got = mine.clone(), [torch.empty_like(mine) for _ in peers]
        moves = [dist.P2POp(dist.isend, sent, group=self.pipe, group_peer=peer) for peer in peers]
        moves += [dist.P2POp(dist.irecv, x, group=self.pipe, group_peer=p) for x, p in zip(got, peers, strict=True)]
        for work in dist.batch_isend_irecv(moves):
            work.wait()
        mine += sum(got)


class Transposed(ParallelStyle):
    """Splits a `Conv1D` of transformers, a linear layer whose weight is transposed, in one of torch's styles."""

    def __init__(self, style: Any) -> None:
        super().__init__()
        self.style, self.is_by_columns = style, isinstance(style, ColwiseParallel)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = self.style
        given = style.input_layouts, (Replicate() if self.is_by_columns else Shard(-1),)
        enter = partial(style._prepare_input_fn, *given)
        leave = partial(style._prepare_output_fn, style.output_layouts, style.use_local_output)
        return distribute_module(module, device_mesh, self.share, enter, leave)

    def share(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        """Gives each rank its part of the weight, and of the bias of a layer that is split by columns."""
        for key, x in list(module.named_parameters(recurse=False)):
            place = Shard(x.dim() - 1) if self.is_by_columns else Shard(0) if x.dim() > 1 else Replicate()
            shared = distribute_tensor(x.detach(), mesh, [place])
            module.register_parameter(key, nn.Parameter(shared, requires_grad=x.requires_grad))


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is a `Conv1D` of transformers, which this file does not import."""
    return type(module).__name__ == "Conv1D"


def check_class(module: nn.Module, path: str) -> None:
    """Refuses to split modules that torch does not split.

    Raises:
        ValueError: names the module and its class.
    """
    if not isinstance(module, (nn.Linear, nn.Embedding)) and not is_transposed(module):
        what = f"module {path} is of class {type(module).__name__}, and torch splits nn.Linear and nn.Embedding"
        raise ValueError(f"{what}. Write it as one of them, or search with hints.fix.tp 1")


class Reached:
    """The parameters that a step reaches on any process; the others keep no gradient, as in one process."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.numbers = {name: n for n, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
        self.device, self.stages, self.seen = device, list[nn.Module](), set[int]()

    def watch(self, stage: nn.Module) -> None:
        """Takes a stage that is sharded: processes that reach fewer parameters send zeros for the others."""
        self.stages.append(stage)
        for part in stage.modules():
            if isinstance(part, FSDPModule):
                part.set_reduce_scatter_unused_params(True, recurse=False)
                for group in fully_shard.state(part)._fsdp_param_groups:  # type: ignore[attr-defined]
                    group.post_backward = partial(self.note, group, group.post_backward)

    def note(self, group: Any, scatter: Callable[..., None], *unused: Any) -> None:
        """Notes which parameters have a gradient before it is scattered."""
        for each in group.fsdp_params if group.reduce_grads else ():
            gradient = each._unsharded_param.grad if hasattr(each, "_unsharded_param") else None
            if gradient is not None or each.unsharded_accumulated_grad is not None:
                self.seen.add(id(each.sharded_param))
        scatter(*unused)

    def own(self) -> Tensor:
        """[parameters] 1 for each that this process has reached in a step, 0 for the others."""
        found = torch.zeros(len(self.numbers), device=self.device)
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                found[self.numbers[name]] = float(id(parameter) in self.seen)
        self.seen.clear()
        return found

    def forget(self, counts: Sequence[float]) -> None:
        """Removes the gradients of those that no process has reached."""
        for name, parameter in (named for stage in self.stages for named in stage.named_parameters()):
            if not counts[self.numbers[name]]:
                parameter.grad = None


class StandIns:
    """Takes part in the collectives of layers that the code of this process leaves out, at random or by its samples.

    Processes gather the weights of a layer together and scatter its gradients together, all in the same order.
    """

    def __init__(self, stage: nn.Module, layers: Sequence[nn.Module]) -> None:
        self.layers, self.place = layers, 0
        stage.register_forward_pre_hook(self.begin, prepend=True)
        stage.register_forward_hook(self.end, prepend=True)
        for layer in layers:
            layer.register_forward_pre_hook(self.meet, prepend=True, with_kwargs=True)

    def begin(self, stage: nn.Module, args: Any) -> None:
        """Runs before the forward of the stage."""
        self.place = 0

    def meet(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs before the forward of a layer: the layers between the last one that ran and this one were left out."""
        place = self.layers.index(layer)
        if torch._C._current_graph_task_id() != -1 or place < self.place:
            return None  # It is run again in the backward pass, or a second time in the forward pass.
        passed, self.place = self.layers[self.place : place], place + 1
        return through(passed, (args, kwargs), is_trained=any(p.requires_grad for p in layer.parameters()))

    def end(self, stage: nn.Module, args: Any, output: Any) -> Any:
        """Runs after the forward of the stage: the layers after the last one that ran were left out."""
        passed, self.place = self.layers[self.place :], len(self.layers)
        return through(passed, output, is_trained=False) if passed else None


def through(layers: Sequence[nn.Module], tree: Any, *, is_trained: bool) -> Any:
    """Does with a tensor of `tree` what FSDP does before and after each of some layers, without running the layers.

    If they or what follows is trained, the tensor gets a gradient: otherwise their gradients would be scattered last.
    """
    is_trained |= any(p.requires_grad for layer in layers for p in layer.parameters())
    leaves, structure = tree_flatten(tree)
    floats = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    for place in [n for n in floats if leaves[n].requires_grad][:1] or floats[:1]:
        x = leaves[place]
        never = torch.zeros((), dtype=torch.bool, device=x.device)
        if is_trained and torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()
        for layer in layers:
            state = fully_shard.state(layer)  # type: ignore[attr-defined]
            (zero,), _ = state._pre_forward(layer, (torch.where(never, x, 0.0).sum(),), {})
            x = x + state._post_forward(layer, None, zero.clone()).to(x.dtype)
        leaves[place] = x
    return tree_unflatten(leaves, structure)


def seed_all(seed: int) -> None:
    """Seeds the common generators of torch, Python and numpy; torch also runs without numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    with suppress(ModuleNotFoundError):
        import_module("numpy").random.seed(seed % 2**32)


def is_called(module: nn.Module) -> bool:
    """Whether a module has code of its own; lists and dictionaries of modules have none, and are never called."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def called_parts(module: nn.Module) -> list[nn.Module]:
    """A module, or the modules with parameters inside of one that is never called."""
    if is_called(module):
        return [module] if any(True for _ in module.parameters()) else []
    return [part for child in module.children() for part in called_parts(child)]


def check_recomputed(modules: Mapping[str, nn.Module], paths: Sequence[str]) -> None:
    """Refuses to recompute modules that have no forward of their own, such as lists of layers.

    Raises:
        ValueError: names the first of them.
    """
    for path in (path for path in paths if not is_called(modules[path])):
        what = f"the plan computes module {path} again, and the code of its layers is in a module around it"
        repair = f"Write {path} as a module with a forward, or search with hints.fix.recompute none"
        raise ValueError(f"{what}. {repair}")


def shared_names(model: nn.Module) -> list[set[str]]:
    """For each parameter with several names, these names."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return [found for found in names.values() if len(found) > 1]


def parameter_names(module: nn.Module) -> set[str]:
    """All names of all parameters."""
    return {name for name, _ in module.named_parameters(remove_duplicate=False)}


def check_alike(model: nn.Module) -> None:
    """Refuses models that differ from process to process: each process would train a part of another model.

    Raises:
        ValueError: on every process, names the first parameter that differs.
    """
    sums = {n: float("nan") if p.is_meta else float(p.detach().double().sum()) for n, p in model.named_parameters()}
    mine = {name: f"{tuple(p.shape)}, sum {sums[name]!r}" for name, p in model.named_parameters()}
    every: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    for rank, other in enumerate(every):
        different = [name for name in {**every[0], **other} if every[0].get(name) != other.get(name)]
        for name in different[:1]:
            here, there = every[0].get(name, "absent"), other.get(name, "absent")
            repair = "Build the same model on every process: the same modules, after the same torch.manual_seed."
            raise ValueError(f"model.{name}: process 0 has {here}, process {rank} has {there}. {repair}")


def run_split(forward: Callable[..., Any], path: str, ranks: int, *args: Any, **kwargs: Any) -> Any:
    """Runs code whose layers are split; an error says what the code has to leave to the layers.

    Raises:
        ValueError: names the module and the line.
    """
    try:
        return forward(*args, **kwargs)
    except (ValueError, RuntimeError, IndexError) as fault:
        found = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(fault.__traceback__)]
        own, libraries = Path(__file__), Path(torch.__file__).parent
        users = [(file, number) for file, number in found if Path(file) != own and libraries not in Path(file).parents]
        if str(fault).startswith("module ") or not users:
            raise
        file, number = users[-1]
        what = f"does not run on the part of its layers that each of {ranks} ranks has: {str(fault).splitlines()[0]}"
        where = f"at {file}:{number}: {linecache.getline(file, number).strip()}"
        repair = f"Write chunk(3, dim=-1) and -1 for numbers of heads, or divide attributes like num_heads by {ranks}."
        raise ValueError(f"module {path}: {what}, {where}. {repair}") from fault


def interleaved(pieces: Sequence[int], ranks: int) -> Tensor:
    """The order of the rows of a fused weight in which each rank's shares of all pieces are together."""
    ends = torch.tensor(pieces).cumsum(0)
    rows = [torch.arange(int(end) - size, int(end)).view(ranks, -1) for size, end in zip(pieces, ends, strict=True)]
    return torch.cat(rows, dim=1).flatten()


def matches(path: str, glob: str) -> bool:
    """Whether a glob matches the path of a module; each `*` stands for one number."""
    return fnmatchcase(path, glob) and path.count(".") == glob.count(".")


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
