"""Where a tensor changes its placement on the way into a module."""

import pytest
import torch

from automap.runtime.mesh_groups import Axis
from automap.runtime.trainer import borders
from automap.runtime.trainer.roles import Border, Move
from automap.runtime.trainer.sharded_modules import layouts_of
from ir.factors import BROADCAST, PARTIAL

GATHERED = Move(given=1, wanted=BROADCAST, gradient=PARTIAL)
"""A move from a part of the sequence to the whole."""


@pytest.fixture
def entered(monkeypatch):
    """A forward behind borders: what its arguments were moved by, with the sum of what it is given."""
    seen = []

    def moved(x, move, layouts):
        seen.append((tuple(x.shape), move))
        return x.repeat_interleave(layouts.mesh.axes[0].size, 1)

    monkeypatch.setattr(borders, "moved", moved)
    axis = Axis(name="tp", number=0, size=2, index=0, group=None)

    def make(*some):
        module = torch.nn.Module()
        module.forward = lambda *args: [tuple(x.shape) for x in args]
        borders.enter_by_borders(module, some, layouts_of(axis))
        return module.forward, seen

    return make


def border(name, *shape, move=GATHERED):
    return Border(name=name, shape=shape, batch_dim=0, move=move)


def test_a_module_that_is_called_several_times_has_alike_borders(entered):
    """Layers that share all weights, as in ALBERT: the graph has one tensor for each call."""
    forward, seen = entered(border("x", 1, 8, 4), border("x_1", 1, 8, 4), border("x_2", 1, 8, 4))
    for _ in range(3):
        assert forward(torch.zeros(2, 4, 4)) == [(2, 8, 4)]
    assert seen == [((2, 4, 4), GATHERED)] * 3


def test_each_border_has_an_argument_of_its_own(entered):
    forward, seen = entered(border("x", 1, 8, 4), border("memory", 1, 8, 4), border("mask", 1, 8))
    assert forward(torch.zeros(2, 4), torch.zeros(2, 4, 4), torch.zeros(2, 4, 4)) == [(2, 8), (2, 8, 4), (2, 8, 4)]
    assert len(seen) == 3


def test_a_tensor_that_is_handed_over_twice_is_moved_once_for_both(entered):
    """An example is attention(y, y), self-attention; with a border for each argument, each is moved."""
    forward, seen = entered(border("x", 1, 8, 4))
    y = torch.zeros(2, 4, 4)
    assert forward(y, y) == [(2, 8, 4)] * 2
    assert len(seen) == 1
    forward, seen = entered(border("x", 1, 8, 4), border("memory", 1, 8, 4))
    assert forward(y, y) == [(2, 8, 4)] * 2


def test_of_two_arguments_of_one_shape_that_is_moved_with_which_the_code_runs(monkeypatch):
    """As in the output of attention, whose heads are split, and the residual is split alike (ELECTRA)."""
    seen = []
    monkeypatch.setattr(borders, "moved", lambda x, move, layouts: x.repeat_interleave(2, 2))
    axis = Axis(name="tp", number=0, size=2, index=0, group=None)

    def output(hidden, residual):
        seen.append(1)
        return hidden @ torch.ones(2, 4) + residual

    module = torch.nn.Module()
    module.forward = output
    move = Move(given=2, wanted=BROADCAST, gradient=BROADCAST)
    borders.enter_by_borders(module, [border("linear", 1, 8, 4, move=move)], layouts_of(axis))
    heads, residual = torch.zeros(2, 8, 2), torch.ones(2, 8, 2)
    for passes in (2, 3):
        torch.testing.assert_close(module.forward(heads, residual), torch.ones(2, 8, 4))
        assert len(seen) == passes, "it is found once"
    module.forward = output
    borders.enter_by_borders(module, [border("linear", 1, 8, 4, move=move)], layouts_of(axis))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module.forward(heads, torch.zeros(2, 3))


def test_a_border_without_an_argument_is_refused_each_time(entered):
    other = Move(given=BROADCAST, wanted=1, gradient=1)
    forward, _ = entered(border("x", 1, 8, 4), border("other", 1, 4, 4, move=other))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"no argument has the shape .* of other"):
            forward(torch.zeros(2, 4, 4))


def test_of_two_arguments_of_one_shape_that_is_moved_which_the_maker_has_returned(monkeypatch):
    """As in decoders whose inputs are as long as what the encoder returns: the code runs with either."""
    monkeypatch.setattr(borders, "moved", lambda x, move, layouts: x + 1)
    axis = Axis(name="tp", number=0, size=2, index=0, group=None)
    network = torch.nn.Module()
    network.encoder, network.decoder = torch.nn.Identity(), torch.nn.Module()
    network.decoder.forward = lambda hidden, memory: (hidden, memory)
    move = Move(given=BROADCAST, wanted=BROADCAST, gradient=PARTIAL)
    border = Border(name="memory", shape=(1, 8, 4), batch_dim=0, move=move, maker="encoder")
    hidden, memory = torch.zeros(2, 8, 4), torch.ones(2, 8, 4)
    with borders.returned_by(network, {"encoder"}) as returned:
        borders.enter_by_borders(network.decoder, [border], layouts_of(axis), returned)
        found = network.decoder(hidden, network.encoder(memory))
        assert [float(x.mean()) for x in found] == [0, 2]
    # In later passes it is the argument at the same place, and no tensor is kept for it.
    assert [float(x.mean()) for x in network.decoder(hidden, memory)] == [0, 2] and not returned


def test_what_was_found_with_a_wrong_argument_is_forgotten(monkeypatch):
    """A module inside of one whose first choice fails sees tensors of other sizes the next time."""
    monkeypatch.setattr(borders, "moved", lambda x, move, layouts: x.repeat_interleave(2, 1) if move == GATHERED else x)
    axis = Axis(name="tp", number=0, size=2, index=0, group=None)
    outer, inner = torch.nn.Module(), torch.nn.Module()
    outer.inner = inner
    inner.forward = lambda x: x
    outer.forward = lambda x, y: inner(x) @ torch.ones(4, 4) + inner(y[:, :4])
    borders.enter_by_borders(inner, [border("x", 1, 8, 4)], layouts_of(axis))
    seen = []
    forget = borders._Entered._forget
    monkeypatch.setattr(borders._Entered, "_forget", lambda self: (forget(self), seen.append(inner.forward._moves)))
    borders.enter_by_borders(
        outer, [border("y", 1, 4, 4, move=Move(given=-1, wanted=-1, gradient=-2))], layouts_of(axis)
    )
    with pytest.raises(RuntimeError):
        outer(torch.zeros(2, 4, 4), torch.zeros(2, 4, 3))
    assert seen == [{}]
