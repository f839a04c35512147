"""Windows of attention: whatever way a mask is written, its band is that of the mask written down with numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from ir import attention_windows
from ir.attention_windows import CAUSAL, EVERYTHING, Mask, Window, attention_masks
from ir.build import GraphBuilder
from ir.graph import Graph, Tensor
from ir.zoo import build

Shown = npt.NDArray[np.bool_]
HEADS, SIZE = 2, 4


def shown(window: Window, queries: int, keys: int) -> Shown:
    """[queries, keys] what a window shows."""
    ahead = np.arange(keys) - np.arange(queries)[:, None]
    yes = np.ones_like(ahead, dtype=bool)
    if window.left is not None:
        yes &= ahead >= -window.left
    return yes if window.right is None else yes & (ahead <= window.right)


class Writer:
    """One attention over `length` positions, as an exporter writes it, around a mask."""

    def __init__(self, length: int) -> None:
        self.b, self.length, self.count = GraphBuilder(), length, 0
        self.b.input("x", (1, length, HEADS * SIZE))

    def op(self, kind: str, *inputs: str | npt.ArrayLike, **attributes: object) -> str:
        self.count += 1
        names = [
            n if isinstance(n, str) else self.b.constant(f"c{self.count}_{i}", np.asarray(n))
            for i, n in enumerate(inputs)
        ]
        return self.b.add(kind, names, [f"t{self.count}"], attributes=attributes, opset=18)[0]

    def heads(self, which: str) -> str:
        self.b.parameter(which, (HEADS * SIZE, HEADS * SIZE))
        split = self.op("Reshape", self.op("MatMul", "x", which), np.array([1, self.length, HEADS, SIZE]))
        return self.op("Transpose", split, perm=(0, 2, 3, 1) if which == "k" else (0, 2, 1, 3))

    def scores(self) -> str:
        return self.op("MatMul", self.heads("q"), self.heads("k"))

    def graph(self, scores: str) -> Graph:
        weights = self.op("Softmax", scores, axis=-1)
        if self.b.tensors[weights].shape[-1] > self.length:
            weights = self.op("Slice", weights, np.array([0]), np.array([self.length]), np.array([3]))
        out = self.op("Transpose", self.op("MatMul", weights, self.heads("v")), perm=(0, 2, 1, 3))
        return self.b.finish([self.op("Reshape", out, np.array([1, self.length, HEADS * SIZE]))])

    def positions(self) -> tuple[str, str]:
        """[queries, 1] and [1, keys], from a range."""
        row = self.op("Range", np.array(0), np.array(self.length), np.array(1))
        return self.op("Unsqueeze", row, np.array([1])), self.op("Unsqueeze", row, np.array([0]))

    def band(self, window: Window, places: tuple[str, str] | None = None) -> str:
        """Truth values of a window, by compares of positions."""
        i, j = places or self.positions()
        mask = self.op("GreaterOrEqual", i, np.array(0))
        if window.right is not None:
            mask = self.op("And", mask, self.op("LessOrEqual", j, self.op("Add", i, np.array(window.right))))
        if window.left is not None:
            mask = self.op("And", mask, self.op("Greater", j, self.op("Sub", i, np.array(window.left + 1))))
        return mask

    def added(self, mask: str, hidden: float = -3.4028234663852886e38) -> str:
        """The scores and what truth values add to them."""
        return self.op("Add", self.scores(), self.op("Where", mask, np.float32(0), np.float32(hidden)))


def compared(w: Writer, window: Window) -> str:
    return w.added(w.band(window))


def infinite(w: Writer, window: Window) -> str:
    mask = w.op("Unsqueeze", w.band(window), np.array([0, 1]))
    return w.added(w.op("Expand", mask, np.array([1, 1, w.length, w.length])), -np.inf)


def filled(w: Writer, window: Window) -> str:
    """Scores are replaced, not added to, and scaled behind."""
    return w.op("Mul", w.op("Where", w.band(window), w.scores(), np.float32(-1e9)), np.float32(0.5))


def subtracted(w: Writer, window: Window) -> str:
    """`(1 - mask) * -10000`, as BERT has it."""
    mask = w.op("Cast", w.band(window), to="float32")
    return w.op("Add", w.scores(), w.op("Mul", w.op("Sub", np.float32(1), mask), np.float32(-10000)))


def triangles(w: Writer, window: Window) -> str:
    ones = w.op("ConstantOfShape", np.array([w.length, w.length]), value=1.0)
    for side, upper in ((window.right, 0), (window.left, 1)):
        if side is not None:
            ones = w.op("Trilu", ones, np.array(side if upper == 0 else -side), upper=upper)
    return w.added(w.op("Cast", ones, to="bool"))


def padded(w: Writer, window: Window) -> str:
    """A mask of padding, which data decide, hides nothing in any case."""
    w.b.input("padding", (1, w.length), "bool")
    padding = w.op("Unsqueeze", "padding", np.array([1, 2]))
    return w.added(w.op("And", padding, w.band(window)))


def padded_apart(w: Writer, window: Window) -> str:
    w.b.input("padding", (1, w.length))
    added = w.op("Mul", w.op("Sub", np.float32(1), "padding"), np.float32(-3e38))
    return w.op("Add", w.added(w.band(window)), w.op("Unsqueeze", added, np.array([1, 2])))


def looked_up_twice(w: Writer, window: Window) -> str:
    """Positions of each sample, looked up by the sample and the position, as transformers does."""
    row = w.op("Range", np.array(0), np.array(w.length), np.array(1))
    kept = w.op("Unsqueeze", row, np.array([0]))
    zeros = w.op("Mul", row, np.array(0))
    at = w.op("Concat", *(w.op("Unsqueeze", part, np.array([1])) for part in (zeros, row)), axis=-1)
    sides = (w.op("Unsqueeze", at, np.array([axis])) for axis in (1, 0))
    i, j = (w.op("GatherND", kept, side) for side in sides)
    return w.added(w.band(window, (i, j)))


def looked_up(w: Writer, window: Window) -> str:
    """A table of distances, looked up by positions, turned and cut."""
    length = w.length
    kept = w.op("CumSum", w.op("ConstantOfShape", np.array([length + 1]), value=1), np.array(0))
    row = w.op("Slice", kept, np.array([0]), np.array([length]), np.array([0]))
    again = w.op("Gather", row, w.op("Range", np.array(0), np.array(length), np.array(1)), axis=0)
    column = w.op("Transpose", w.op("Reshape", again, np.array([1, length])), perm=(1, 0))
    return w.added(w.band(window, (column, w.op("Reshape", row, np.array([1, length])))))


def with_sinks(w: Writer, window: Window) -> str:
    w.b.parameter("sinks", (1, HEADS, w.length, 1))
    return w.op("Concat", compared(w, window), "sinks", axis=-1)


def with_a_zero(w: Writer, window: Window) -> str:
    """One more place of which every head and every query makes the same, as a softmax with one more in its sum."""
    return w.op("Pad", compared(w, window), np.array([0, 0, 0, 0, 0, 0, 0, 1]))


def several_samples(w: Writer, window: Window) -> str:
    """Heads beside the samples, as OPT has them."""
    joined = w.op("Reshape", w.scores(), np.array([1, HEADS, w.length, w.length]))
    mask = w.op("Where", w.band(window), np.float32(0), np.float32(-1e9))
    return w.op("Reshape", w.op("Add", joined, mask), np.array([HEADS, w.length, w.length]))


WAYS: list[Callable[[Writer, Window], str]] = [
    compared, infinite, filled, subtracted, triangles, padded, padded_apart, looked_up_twice, looked_up, with_sinks,
    with_a_zero, several_samples,
]  # fmt: skip
WINDOWS = [
    CAUSAL,
    Window(left=5, right=0),
    Window(left=4, right=4),
    Window(left=3, right=8),
    Window(left=0, right=0),
    Window(left=7),
    Window(left=100, right=0),
    Window(left=2000, right=2000),
]


def only_mask(graph: Graph) -> Mask:
    (mask,) = attention_masks(graph).values()
    return mask


@pytest.mark.parametrize("length", [24, 1500])
@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: f"{w.left}-{w.right}")
@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_a_mask_is_the_band_that_it_shows(way: Callable[[Writer, Window], str], window: Window, length: int) -> None:
    w = Writer(length)
    mask = only_mask(w.graph(way(w, window)))
    assert (mask.queries, mask.keys) == (length, length)
    expected = shown(window, length, length)
    assert np.array_equal(shown(mask.window, length, length), expected)
    # A side that hides nothing is none.
    assert (mask.window == EVERYTHING) == bool(expected.all())
    assert (mask.window == CAUSAL) == np.array_equal(expected, np.tri(length, dtype=bool))


@pytest.mark.parametrize("window", [Window(left=2, right=2), Window(left=6, right=0)])
def test_a_stored_mask_shows_its_window(window: Window) -> None:
    w = Writer(24)
    scores = w.op("Add", w.scores(), np.where(shown(window, 24, 24), 0.0, -np.inf).astype(np.float32))
    assert only_mask(w.graph(scores)).window == window


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("stated", "window"),
    [
        ({}, EVERYTHING),
        ({"is_causal": 1}, CAUSAL),
        ({"is_causal": 1, "left_window_size": 9}, Window(left=9, right=0)),
        ({"left_window_size": 6, "right_window_size": 3}, Window(left=6, right=3)),
        ({"left_window_size": 64}, EVERYTHING),
    ],
)
def test_the_window_of_an_attention_operator_is_read_from_its_attributes(
    stated: dict[str, int], window: Window, masked: bool
) -> None:
    w = Writer(24)
    q, v = w.heads("q"), w.heads("v")
    operands = [q, v, v, w.op("Unsqueeze", w.band(Window(left=5)), np.array([0, 1]))] if masked else [q, v, v]
    w.b.add("Attention", operands, ["y"], attributes=stated, opset=23)
    left = min(5, window.left or 5) if masked else window.left
    assert only_mask(w.b.finish(["y"])).window == Window(left=left, right=window.right)


@pytest.mark.parametrize(
    "mask",
    [
        np.arange(24) != np.arange(24)[:, None],
        (np.arange(24) // 6) == (np.arange(24) // 6)[:, None],
        np.zeros((24, 24), dtype=bool),
        np.arange(24)[None, :].repeat(24, 0) < 20,
    ],
    ids=["a hole", "chunks", "nothing", "padding"],
)
def test_what_is_no_band_hides_nothing(mask: Shown) -> None:
    w = Writer(24)
    assert only_mask(w.graph(w.op("Add", w.scores(), np.where(mask, 0, -1e9).astype(np.float32)))).window == EVERYTHING


def test_what_is_unknown_hides_nothing() -> None:
    """Data, kinds that are not followed, numbers that are not kept, and a bias of parameters."""
    w = Writer(24)
    w.b.input("bias", (1, HEADS, 24, 24))
    odd = w.op("Cast", w.op("Sin", w.op("Cast", w.band(CAUSAL), to="float32")), to="bool")
    assert only_mask(w.graph(w.op("Add", w.added(odd), "bias"))).window == CAUSAL  # as it is made
    w = Writer(24)
    i, j = (
        w.b.add_tensor(Tensor(name=n, shape=s, dtype="int64", role="buffer"))
        for n, s in (("i", (24, 1)), ("j", (1, 24)))
    )
    assert only_mask(w.graph(w.added(w.band(Window(left=5, right=0), (i, j))))).window == CAUSAL  # as it is made
    w = Writer(24)
    w.b.parameter("table", (1, HEADS, 24, 24))
    both = w.op("Add", "table", w.op("Where", w.band(CAUSAL), np.float32(0), np.float32(-1e9)))
    assert only_mask(w.graph(w.op("Add", w.scores(), both))).window == EVERYTHING


def test_layers_that_share_a_mask_look_at_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    real = attention_windows._Finder._looked_at
    monkeypatch.setattr(
        attention_windows._Finder, "_looked_at", lambda self, *rest: looked.append(rest[0]) or real(self, *rest)
    )
    masks = attention_masks(build("gpt:layers=80,hidden=64,heads=4,seq_len=32,vocab_size=128"))
    assert len(masks) == 80 and len(looked) == 1
