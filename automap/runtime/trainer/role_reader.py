"""Finds the roles of modules from the placements of operators in a plan.

A plan states placements of operators; the trainer can only change placements in front of and behind modules. So every
operator of the graph is checked. Operators of linear layers, embeddings and norms may change placements where their
module begins or ends. All other operators run as the user wrote them, on the local parts of tensors; this is right only
if the plan changes no placement there. A plan that needs more than that is refused, with the name of the operator.
Nothing runs here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from automap.errors import PlanError
from automap.globs import most_specific
from automap.plan import AxisSharding, Plan, Stage, model_ref
from automap.runtime.trainer.borders import Use, by_border, called_modules
from automap.runtime.trainer.module_tree import role_of, tied_names
from automap.runtime.trainer.recomputation import recomputed_modules
from automap.runtime.trainer.roles import Border, Move, Role, RoleKind, Roles
from automap.runtime.trainer.supported_plans import check_parameters, check_rectangular, check_statistics, refuse
from ir.factors import BROADCAST, PARTIAL, Placement, Signature, gradient_placement, placement_text, whole_signature
from ir.graph import Graph, Operator
from ir.linkage import operator_signatures


def read_roles(plan: Plan, graph: Graph, module: nn.Module) -> Roles:
    """The roles that a plan gives to the modules of a network.

    Args:
        plan: a plan of `graph`.
        graph: the graph of the network: scopes of operators are paths of modules, and parameters have their names.
        module: a network with the structure of the graph.

    Raises:
        PlanError: plan, graph and module do not belong together, or the plan is finer than modules.
    """
    if plan.model.sha256 != model_ref(graph).sha256:
        raise PlanError(
            f"the plan is for {plan.model}, not for {model_ref(graph)}", field="plan.model.sha256",
            value=plan.model.sha256[:12], repair="Give the graph that the plan was made for.",
        )  # fmt: skip
    check_rectangular(plan)
    check_parameters(graph, module)
    check_statistics(plan, graph)
    stage = plan.stages[0]
    live = [(name, size) for name, size in stage.mesh if size > 1 and name not in stage.batch_axes]
    if len(live) > 1:
        names = [name for name, _ in live]
        raise refuse("stages[0].mesh", names, "modules are split over one axis besides the batch axes")
    roles = Roles()
    if live:
        roles.axis, roles.axis_size = live[0]
    by_operator = list(_staged(plan, graph))
    for op, number in by_operator:
        roles.stages[op.scope] = min(number, roles.stages.get(op.scope, number))
        roles.ends[op.scope] = max(number, roles.ends.get(op.scope, number))
    chosen = {op.name: _signature(plan.stages[n], n, graph, op, roles.axis) for op, n in by_operator}
    if stage.zero.stage and roles.axis in stage.zero.axes:
        # Ranks that repeat all work are replicas with the same samples.
        parts = [name for name, signature in chosen.items() if signature is not None and not signature.is_whole]
        if parts:
            text = (
                f"states of modules are spread over axes that split nothing but the batch, and this splits {parts[0]}"
            )
            raise refuse("stages[0].zero.axes", roles.axis, text)
        roles.axis, roles.axis_size = None, 1
    if roles.axis is not None:
        _Reader(graph, module, chosen, roles).read()
    roles.recomputed = recomputed_modules(graph, plan, by_operator, module)
    return roles


def _staged(plan: Plan, graph: Graph) -> Iterator[tuple[Operator, int]]:
    """The operators that belong to a stage, each with the number of its stage."""
    number = 0
    for op in graph.operators:
        # A stage may begin with a view of a weight, which is not work of its own.
        if number + 1 < len(plan.stages) and op.name == plan.stages[number + 1].operators[0]:
            number += 1
        if op.is_live:
            yield op, number
    if number + 1 < len(plan.stages):
        name = plan.stages[number + 1].operators[0]
        raise refuse(f"stages[{number + 1}].operators", name, "is not an operator of the model", "Correct the name.")


def _signature(stage: Stage, number: int, graph: Graph, op: Operator, axis: str | None) -> Signature | None:
    """The signature of an operator on the sharding axis; None where there is no such axis."""
    key = most_specific(stage.shardings, op.name)
    entry = stage.shardings[key] if key is not None else {}
    live = dict(stage.mesh)
    for name in entry:
        if name != axis and live.get(name, 1) > 1:
            path = f"stages[{number}].shardings.{key}"
            raise refuse(path, name, f"{op.name} does not split its batch over this axis")
    if axis is None:
        return None
    if axis not in entry:
        return _whole(graph, op)
    texts = entry[axis]
    for signature in operator_signatures(graph, op):
        if AxisSharding.of(signature) == texts:
            return signature
    raise refuse(
        f"stages[{number}].shardings.{key}.{axis}", f"{list(texts.inputs)} -> {list(texts.outputs)}",
        f"is not a signature of {op.name}", "Use one that `automap inspect` lists, or leave the operator out.",
    )  # fmt: skip


def _whole(graph: Graph, op: Operator) -> Signature:
    """The signature of an operator that all ranks compute alike."""
    table = operator_signatures(graph, op)
    return table[whole_signature(table)]


class _Reader:
    """Follows every tensor of the graph from its producer to its consumers, and fills the roles."""

    def __init__(self, graph: Graph, module: nn.Module, chosen: Mapping[str, Signature | None], roles: Roles) -> None:
        self.graph, self.roles = graph, roles
        self.borders = called_modules(module) - _cut_modules(roles)
        self.leaves = {path: child for path, child in module.named_modules() if path and role_of(child) is not None}
        self.operators = self._whole_norms(
            [(op, s) for op in graph.operators if (s := chosen.get(op.name)) is not None]
        )
        self.by_name = {op.name: s for op, s in self.operators}
        self.ties = tied_names(module)
        self.moves: dict[str, dict[str, Move]] = {}

    def _whole_norms(self, operators: list[tuple[Operator, Signature]]) -> list[tuple[Operator, Signature]]:
        """Norms that a plan runs in part on untaken sums run on the sum, which is taken in front of them instead."""
        summed = {op.scope for op, s in operators if PARTIAL in s.inputs and self._leaf(op) is not None}
        norms = {path for path in summed if role_of(self.leaves[path]) == "norm"}
        return [(op, _whole(self.graph, op) if op.scope in norms else s) for op, s in operators]

    def read(self) -> None:
        """Fills `modules`, `sizes`, `summed` and `splits_classes`."""
        for op, signature in self.operators:
            self._check_operator(op, signature)
            self._read_parameters(op, signature)
            self._read_sizes(op, signature)
        for name, tensor in self.graph.tensors.items():
            if tensor.role in ("activation", "input"):
                self._follow(name)
        for path, moves in self.moves.items():
            ops = [(op, s) for op, s in self.operators if op.scope == path]
            kind = self._kind(path, ops)
            pieces = self._pieces(path) if kind == "column" else ()
            self.roles.modules[path] = Role(
                kind=kind, enter=moves.get("enter"), leave=moves.get("leave"), pieces=pieces
            )
            if kind == "along" and role_of(self.leaves[path]) == "norm":
                parameters = self.leaves[path].named_parameters(path, recurse=False)
                self.roles.summed.update(self.ties.get(name, name) for name, _ in parameters)
            leave = moves.get("leave")
            if kind == "row" and leave is not None and leave.wanted >= 0:
                # The bias is added after the reduce-scatter, to the rank's own part.
                self.roles.summed.add(f"{path}.bias")

    def _leaf(self, op: Operator) -> str | None:
        """The path of the module with a known role that an operator belongs to, if there is one."""
        return op.scope if op.scope in self.leaves else None

    def _check_operator(self, op: Operator, signature: Signature) -> None:
        """Refuses an operator whose signature no module runs."""
        if signature.is_whole:
            return
        held = (*zip(op.inputs, signature.inputs, strict=True), *zip(op.outputs, signature.outputs, strict=True))
        for name, placement in held:
            tensor = self.graph.tensors[name]
            if placement >= 0 and placement != tensor.batch_dim and tensor.shape[placement] % self.roles.axis_size:
                raise self._finer(op, f"has parts of {tensor.shape[placement]}, which ranks do not divide")
        is_loss = op.outputs[0] == self.graph.outputs[-1]
        factor = None if signature.factor is None else op.rule.factors[signature.factor]
        if factor is not None and not factor.is_batch and factor.size % self.roles.axis_size:
            raise self._finer(op, f"has parts of unlike sizes, of {factor.size} on {self.roles.axis_size} ranks")
        if is_loss:
            if factor is None or factor.collective is None or signature.inputs[1:] != (BROADCAST,):
                raise self._finer(op, "the loss is whole or split by classes")
            self.roles.splits_classes = True
        elif factor is not None and factor.collective is not None and not self._is_split_norm(op):
            raise self._finer(op, f"exchanges data inside itself ({factor.collective.name})")
        elif self._leaf(op) is None:
            if PARTIAL in (*signature.inputs, *signature.outputs):
                raise self._finer(op, "leaves a sum untaken outside of a linear layer or an embedding")
            for name, gradient in zip(op.inputs, signature.input_gradients, strict=True):
                if gradient == PARTIAL and name in self.graph.differentiable:
                    raise self._finer(op, f"needs the gradient of {name} summed over ranks, and is not a whole layer")

    def _is_split_norm(self, op: Operator) -> bool:
        """Whether an operator is of a norm module that sums over split features once, as one operator or in several.

        The trainer takes its sums over the ranks.
        """
        path = self._leaf(op)
        if path is None or role_of(self.leaves[path]) != "norm":
            return False
        factors = [(other, s.factor) for other, s in self.operators if other.scope == path and s.factor is not None]
        return sum(other.rule.factors[factor].collective is not None for other, factor in factors) == 1

    def _parameters(self, name: str) -> Iterator[str]:
        """The parameters, as the module names them, that a tensor is a view of."""
        maker = self.graph.maker(name)
        if self.graph.tensors[name].role == "parameter":
            yield self.graph.pieces[name][0] if name in self.graph.pieces else name
        elif maker is not None and maker.is_view:
            for operand in maker.inputs:
                yield from self._parameters(operand)

    def _read_parameters(self, op: Operator, signature: Signature) -> None:
        for name, placement, gradient in zip(op.inputs, signature.inputs, signature.input_gradients, strict=True):
            for parameter in self._parameters(name):
                if placement == BROADCAST and gradient == PARTIAL:
                    self.roles.summed.add(self.ties.get(parameter, parameter))
                if self._leaf(op) is None and placement != BROADCAST:
                    raise self._finer(op, f"splits {parameter}, and is not a linear layer, embedding or norm")

    def _read_sizes(self, op: Operator, signature: Signature) -> None:
        held = (*zip(op.inputs, signature.inputs, strict=True), *zip(op.outputs, signature.outputs, strict=True))
        for name, placement in held if self._leaf(op) is None else ():
            tensor = self.graph.tensors[name]
            if placement >= 0 and placement != tensor.batch_dim:
                self.roles.sizes.setdefault(op.scope, set()).add(tensor.shape[placement])

    def _follow(self, name: str) -> None:
        """Finds the moves of one tensor at the borders of modules."""
        producer = self.graph.maker(name)
        if producer is not None and not producer.is_live:
            return self._check_constant(name)
        uses = [
            Use(op, self.by_name[op.name].inputs[i], self._gradient(self.by_name[op.name], i, name))
            for op in map(self.graph.operators.__getitem__, self.graph.consumers[name])
            if op.name in self.by_name
            for i, operand in enumerate(op.inputs)
            if operand == name
        ]
        leaf = None if producer is None else self._leaf(producer)
        held: Placement = BROADCAST
        if producer is not None:
            held = self.by_name[producer.name].outputs[producer.outputs.index(name)]
        outside = [use for use in uses if leaf is None or use.op.scope != leaf]
        # Only layers change the placement of the network's own inputs.
        around = self.borders if producer is not None else self.leaves.keys()
        groups = list(by_border(outside, "" if producer is None else producer.scope, around))
        code = [use for path, some in groups for use in some if path is None]
        plain = dict.fromkeys(use.wanted for use in code)
        if len(plain) > 1:
            raise self._finer(code[0].op, f"and others require unlike placements of {name}")
        if leaf is not None and outside:
            wanted = next(iter(plain), self._left(held, [(p, use) for p, some in groups for use in some]))
            self._move(producer, "leave", Move(given=held, wanted=wanted, gradient=gradient_placement(wanted)))
            held = wanted
        for use in code:
            if use.wanted != held or self._leaf(use.op) is not None:
                text = f"reads {name} as {placement_text(use.wanted)}, and gets {placement_text(held)}"
                raise self._finer(use.op, text)
        for path, some in groups:
            if path is not None:
                self._enter(path, name, some, held)
        return None

    def _gradient(self, signature: Signature, place: int, name: str) -> Placement:
        """The placement of the gradient of an operand; one that has no gradient needs no change of it."""
        if name in self.graph.differentiable:
            return signature.input_gradients[place]
        return gradient_placement(signature.inputs[place])

    def _left(self, held: Placement, uses: Sequence[tuple[str | None, Use]]) -> Placement:
        """The placement in which a layer leaves a tensor that no code around its readers reads."""
        styled = {use.wanted if path in self.leaves else None for path, use in uses}
        (only,) = styled if len(styled) == 1 else (None,)
        return held if held != PARTIAL else BROADCAST if only is None else only

    def _enter(self, path: str, name: str, uses: Sequence[Use], held: Placement) -> None:
        """Records the change of placement of a tensor in front of a module."""
        move = Move(given=held, wanted=uses[0].wanted, gradient=uses[0].gradient)
        is_alone = self._leaf(uses[0].op) is not None and len({use.op.scope for use in uses}) == 1
        if move.is_change and path not in self.leaves and not (is_alone and held == move.wanted):
            tensor = self.graph.tensors[name]
            maker = self.graph.maker(name)
            scope = "" if maker is None else maker.scope
            border = Border(name=name, shape=tensor.shape, batch_dim=tensor.batch_dim, move=move, maker=scope)
            self.roles.borders.setdefault(path, []).append(border)
            move = Move(given=move.wanted, wanted=move.wanted, gradient=gradient_placement(move.wanted))
        for use in uses:
            if self._leaf(use.op) is not None:
                self._move(use.op, "enter", move)

    def _check_constant(self, name: str) -> None:
        """Refuses operators that split a constant, unless its code makes it in the size of the parts.

        Such code is that of a module of which some operator splits the same dim: the numbers that it keeps for the
        sizes of this dim are changed (`Roles.sizes`).
        """
        maker, shape = self.graph.maker(name), self.graph.tensors[name].shape
        sizes = set() if maker is None else self.roles.sizes.get(maker.scope, set())
        readers = [op for n in self.graph.consumers[name] if (op := self.graph.operators[n]).name in self.by_name]
        for op in readers if not any(True for _ in self._parameters(name)) else ():
            placements = {p for p, n in zip(self.by_name[op.name].inputs, op.inputs, strict=True) if n == name}
            for place in placements - {BROADCAST}:
                if place < 0 or shape[place] not in sizes or not self.graph.repeats(name, place):
                    raise self._finer(op, f"splits the constant {name}")

    def _move(self, op: Operator | None, side: str, move: Move) -> None:
        assert op is not None
        known = self.moves.setdefault(op.scope, {}).setdefault(side, move)
        if known != move:
            raise self._finer(op, "has operands of unlike placements")

    def _kind(self, path: str, ops: Sequence[tuple[Operator, Signature]]) -> RoleKind:
        """The kind of role that the operators of a module have together."""
        if all(signature.is_whole for _, signature in ops):
            return "whole"
        kinds: set[RoleKind] = set()
        role = role_of(self.leaves[path])
        if role == "norm":
            return self._norm_kind(path, ops)
        for op, signature in ops:
            last = len(self.graph.tensors[op.outputs[0]].shape) - 1
            out = signature.outputs[0]
            weights = [
                placement
                for name, placement in zip(op.inputs, signature.inputs, strict=True)
                if any(p.endswith("weight") for p in self._parameters(name))
            ]
            if not weights:
                continue
            if all(w == BROADCAST for w in weights) and 0 <= out < last:
                kinds.add("along")
            elif out == last:
                kinds.add("column")
            elif out == PARTIAL:
                kinds.add("vocabulary" if role == "embedding" else "row")
            else:
                kinds.add("whole")
        if len(kinds) != 1 or "whole" in kinds:
            raise self._finer(ops[0][0], "the parts of one module are split in different ways")
        return kinds.pop()

    def _norm_kind(self, path: str, ops: Sequence[tuple[Operator, Signature]]) -> RoleKind:
        """The kind of role of a norm, by what it takes: its own code may be several operators."""
        made = {name for op, _ in ops for name in op.outputs}
        taken = {
            (placement, len(self.graph.tensors[name].shape) - 1)
            for op, signature in ops
            for name, placement in zip(op.inputs, signature.inputs, strict=True)
            if self.graph.tensors[name].role == "activation" and name not in made and not any(self._parameters(name))
        }
        if len(taken) == 1:
            ((placement, last),) = taken
            if 0 <= placement < last:
                return "along"
            if placement == last and self._is_split_norm(ops[0][0]):
                return "features"
        raise self._finer(ops[0][0], "the parts of one module are split in different ways")

    def _pieces(self, path: str) -> tuple[int, ...]:
        """The outputs of each piece of a fused weight, in the order of the weight."""
        spans = sorted(
            (start, stop) for source, _, start, stop in self.graph.pieces.values() if source == f"{path}.weight"
        )
        for start, stop in spans:
            if (stop - start) % self.roles.axis_size:
                raise refuse(path, stop - start, f"{self.roles.axis_size} ranks do not divide a piece")
        return tuple(stop - start for start, stop in spans) if len(spans) > 1 else ()

    def _finer(self, op: Operator, what: str) -> PlanError:
        path = f"shardings.{op.name}.{self.roles.axis}"
        return refuse(path, self.by_name[op.name].text, f"finer than modules: {op.name} {what}")


def _cut_modules(roles: Roles) -> set[str]:
    """The modules with operators in several stages, whose code is cut."""
    found: dict[str, set[int]] = {}
    for scope, first in roles.stages.items():
        for path in itertools.accumulate(scope.split("."), "{}.{}".format):
            found.setdefault(path, set()).update((first, roles.ends[scope]))
    return {path for path, stages in found.items() if len(stages) > 1}
