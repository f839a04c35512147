"""Representative uses of every kind: shapes at one sample, with and without the batch, groups, broadcasting."""

from dataclasses import dataclass, field
from typing import Any

from ir.operators.experts import COMBINE, DISPATCH, PRODUCT

SAMPLES = 6


@dataclass(frozen=True)
class Case:
    kind: str
    shapes: tuple[tuple[int, ...] | None, ...]
    """At one sample; None = an absent operand."""
    batch: tuple[int | None, ...] | None = None
    """Batch dim of each operand; default dim 0 of the first, none of the others."""
    attributes: dict[str, Any] = field(default_factory=dict)
    parameters: tuple[int, ...] = ()
    outputs: tuple[str, ...] = ("y0",)
    """Names of the results, "" where one is not wanted."""
    data: dict[int, Any] = field(default_factory=dict)
    """Operand -> `bool`, an exclusive bound of integers, or (low, high) of floats; default standard normal."""
    opset: int = 24
    id: str = ""

    @property
    def places(self):
        return self.batch if self.batch is not None else (0, *[None] * (len(self.shapes) - 1))


X = (1, 4, 6, 8)
POSITIVE, UNIT, LARGE = (0.5, 1.5), (-0.9, 0.9), (1.1, 2.0)


def unary(kind, data=None, **attributes):
    return Case(kind, (X,), attributes=attributes, data={} if data is None else {0: data})


def binary(kind, data=None, **attributes):
    """With the batch in both, and a row and a column without it."""
    given = {} if data is None else {0: data, 1: data}
    return [
        Case(kind, (X, X), (0, 0), attributes, data=given),
        Case(kind, (X, (6, 1)), (0, None), attributes, data=given, id="column"),
        Case(kind, ((4, 6), (4, 6)), (None, None), attributes, data=given, id="no batch"),
    ]


ELEMENTWISE = [
    *[unary(k) for k in ("Relu", "Sigmoid", "Tanh", "Exp", "Elu", "Selu", "HardSigmoid", "Softplus", "LeakyRelu",
                         "Gelu", "com.microsoft.QuickGelu", "Erf", "Erfc", "Cos", "Sin", "Abs",
                         "HardSwish", "Swish", "Mish", "Celu", "ThresholdedRelu",
                         "Shrink", "Softsign", "Tan", "Atan", "Sinh", "Cosh", "Asinh", "Neg", "Floor", "Ceil", "Round",
                         "Sign", "IsNaN", "IsInf", "Identity")],
    *[unary(k, UNIT) for k in ("Acos", "Asin", "Atanh")], unary("Acosh", LARGE),
    *[unary(k, POSITIVE) for k in ("Sqrt", "Reciprocal", "Log")],
    unary("Not", bool), unary("BitwiseNot", 8), unary("BitCast", 8, to="uint64"), unary("Clip", min=-0.5, max=0.5),
    unary("Cast", to="float64"), Case("Cast", (X,), attributes={"to": "int64"}, id="to integers"),
    unary("Dropout", ratio=0.0),
    Case("CastLike", (X, (1,)), (0, None)),
    *binary("Add"), *binary("Sub"), *binary("Mul"), *binary("Div", POSITIVE), *binary("Max"), *binary("Min"),
    *binary("Pow", POSITIVE), *binary("Equal", 2), *binary("Less"), *binary("LessOrEqual"), *binary("Greater"),
    *binary("GreaterOrEqual"), *binary("And", bool), *binary("Or", bool), *binary("Xor", bool),
    *binary("Mod", (1, 5)), *binary("BitShift", 4, direction="LEFT"), *binary("BitwiseAnd", 8),
    *binary("BitwiseOr", 8), *binary("BitwiseXor", 8), *binary("PRelu"), *binary("Sum"), *binary("Mean"),
    Case("Sum", (X, X, X), (0, 0, 0), id="three"),
    Case("Add", ((1, 4, 6), (6,)), parameters=(1,), id="bias"),
    Case("Add", ((4, 6), (4, 1)), (0, 0), id="merged batch"),
    Case("Where", (X, X, X), (0, 0, 0), data={0: bool}), Case("Where", ((1, 1, 6, 8), X, ()), (None, 0, None),
                                                              data={0: bool}, id="fill"),
    Case("QuantizeLinear", (X, (4,), (4,)), attributes={"axis": 1}, data={1: POSITIVE, 2: 1}, id="axis"),
    Case("QuantizeLinear", (X, ()), data={1: POSITIVE}),
    Case("DequantizeLinear", (X, (4,), (4,)), attributes={"axis": 1}, data={0: 8, 1: POSITIVE, 2: 8}),
]  # fmt: skip

CONTRACTIONS = [
    Case("MatMul", ((1, 4, 6), (6, 8)), parameters=(1,)), Case("MatMul", ((4, 6), (6, 8)), (None, None), id="no batch"),
    Case("MatMul", ((1, 2, 4, 6), (1, 2, 6, 8)), (0, 0), id="batched"), Case("MatMul", ((6, 4), (4, 8)), id="merged"),
    Case("MatMul", ((1, 4, 6), (1, 6, 8)), (0, None), id="broadcast"), Case("MatMul", ((1, 4, 6), (6,)), id="vector"),
    Case("Gemm", ((1, 6), (6, 8))), Case("Gemm", ((1, 6), (8, 6)), attributes={"transB": 1}, id="transposed"),
    Case("Gemm", ((6, 1), (6, 8)), (1, None), {"transA": 1, "alpha": 0.5}, id="transposed A"),
    Case("Gemm", ((1, 6), (6, 8), (8,)), attributes={"beta": 2.0}, id="bias"),
    Case("Einsum", ((1, 4, 2, 6), (1, 8, 2, 6)), (0, 0), {"equation": "bshd,bthd->bhst"}),
    Case("Einsum", ((1, 4, 6), (6, 2, 8)), attributes={"equation": "bsk,khd->bshd"}, id="projection"),
    Case("Einsum", ((1, 4), (6, 8)), attributes={"equation": "bi,jk->bij"}, id="a sum of one operand"),
    Case("Einsum", ((1, 4), (1, 4)), (0, None), {"equation": "bi,bi->bi"}, id="broadcast samples"),
    Case("Einsum", ((1, 4), (4, 6), (6, 8)), attributes={"equation": "bi,ij,jk->bk"}, id="three"),
    Case("Conv", ((1, 4, 6, 8), (8, 4, 3, 3)), attributes={"pads": (1, 1, 1, 1)}),
    Case("Conv", ((1, 4, 6, 8), (8, 4, 3, 3), (8,)), attributes={"auto_pad": "SAME_UPPER"}, id="bias, same"),
    Case("Conv", ((1, 4, 12, 12), (4, 4, 3, 3)), attributes={"pads": (2, 2, 2, 2), "dilations": (2, 2)}, id="dilated"),
    Case("Conv", ((1, 4, 8, 8), (8, 2, 3, 3)), attributes={"group": 2, "strides": (2, 2), "pads": (1, 1, 1, 1)},
         id="group"),
    Case("Conv", ((1, 4, 8, 8), (8, 1, 3, 3)), attributes={"group": 4}, id="depthwise"),
    Case("Conv", ((1, 4, 6, 8), (8, 2, 3, 3)), (1, 0), {"group": 2, "pads": (1, 1, 1, 1)}, id="weights of samples"),
    Case("Conv", ((1, 4, 6, 8), (8, 4, 3, 3)), (None, 0), {"pads": (1, 1, 1, 1)}, id="image of all samples"),
    Case("Conv", ((1, 4, 8, 8), (6, 4, 2, 2)), attributes={"strides": (2, 2)}, id="patch"),
    Case("Conv", ((1, 4, 8), (6, 4, 2)), attributes={"strides": (2,), "pads": (1, 0)}, id="shifted patch"),
    Case("Conv", ((4, 4, 6), (8, 4, 3)), (None, None), {"pads": (1, 1)}, id="no batch"),
    Case("Conv", ((1, 4, 4, 4, 4), (8, 4, 3, 3, 3)), attributes={"pads": (1, 1, 1, 1, 1, 1)}, id="3-D"),
    Case("ConvTranspose", ((1, 4, 4, 4), (4, 6, 2, 2)), attributes={"strides": (2, 2)}),
    Case("ConvTranspose", ((1, 4, 4, 4), (4, 6, 2, 2)), (1, 0), {"group": 2}, id="weights of samples"),
    Case("DeformConv", ((1, 4, 6, 8), (8, 4, 3, 3), (1, 18, 6, 8), (8,), (1, 9, 6, 8)), (0, None, 0, None, 0),
         {"pads": (1, 1, 1, 1)}, data={2: UNIT}, id="bias, mask"),
    Case("DeformConv", ((1, 4, 8, 8), (4, 2, 2, 2), (1, 16, 4, 4)), (0, None, 0),
         {"group": 2, "offset_group": 2, "strides": (2, 2)}, data={2: UNIT}, id="groups"),
    Case("ConvTranspose", ((1, 4, 4, 4), (4, 4, 3, 3), (8,)), attributes={"strides": (2, 2), "group": 2,
         "auto_pad": "SAME_UPPER"}, id="group, bias"),
]  # fmt: skip

NORMS = [
    *[Case(k, ((1, 4, 6, 8),), attributes={"axis": a}, id=f"axis {a}") for k in ("Softmax", "LogSoftmax", "Hardmax")
      for a in (-1, 1)],
    Case("Softmax", ((1, 4, 6),), attributes={"axis": 1}, opset=11, id="flattened"),
    Case("Softmax", ((1, 4),), attributes={"axis": 0}, id="over samples"),
    Case("LayerNormalization", ((1, 4, 6), (6,), (6,))), Case("LayerNormalization", ((1, 4, 6), (4, 6)),
         attributes={"axis": 1}, outputs=("y0", "y1", "y2"), id="two dims"),
    Case("RMSNormalization", ((1, 4, 6), (6,))), Case("SimplifiedLayerNormalization", ((1, 4, 6), (6,))),
    Case("BatchNormalization", ((1, 4, 6, 8), (4,), (4,), (4,), (4,)), data={4: POSITIVE}),
    Case("BatchNormalization", ((1, 4), (4,), (4,), (4,), (4,)), outputs=("y0", "y1", "y2"), data={4: POSITIVE},
         id="running"),
    Case("InstanceNormalization", ((1, 4, 6, 8), (4,), (4,))),
    Case("GroupNormalization", ((1, 8, 4, 6), (8,), (8,)), attributes={"num_groups": 4}),
    Case("GroupNormalization", ((1, 8, 4, 6), (4,), (4,)), attributes={"num_groups": 4}, opset=18, id="by group"),
    Case("LRN", ((1, 4, 6, 8),), attributes={"size": 3}), Case("LpNormalization", (X,), attributes={"axis": 1, "p": 1}),
    Case("LpNormalization", ((1, 6),), id="order 2"), Case("MeanVarianceNormalization", (X,)),
    Case("MeanVarianceNormalization", (X,), attributes={"axes": (2, 3)}, id="space"),
]  # fmt: skip

REDUCTIONS = [
    *[Case(f"Reduce{k}", (X,), attributes={"axes": axes, "keepdims": keep}, data={0: POSITIVE}, id=f"{axes} {keep}")
      for k in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
      for axes, keep in (((2,), 1), ((1, -1), 0))],
    *[Case(f"Reduce{k}", ((1, 4),), attributes={"axes": (0,), "keepdims": 0}, id="over samples")
      for k in ("Sum", "Mean", "Max")],
    *[Case(k, (X,), attributes={"axis": 2, "keepdims": keep}, id=str(keep)) for k in ("ArgMax", "ArgMin")
      for keep in (0, 1)],
    *[Case(k, (X,), attributes={"axis": 1, "reverse": r}, id=str(r)) for k in ("CumSum", "CumProd") for r in (0, 1)],
    Case("CumSum", ((1, 4),), attributes={"axis": 0}, id="over samples"),
    Case("TopK", (X,), attributes={"k": 2, "axis": 2}, outputs=("y0", "y1")),
    Case("TopK", (X,), attributes={"k": 2, "axis": 2}, outputs=("", "y1"), id="places"),
    unary("Trilu", upper=0, k=0),
    Case("DFT", ((1, 4, 6, 2),)), Case("DFT", ((1, 6, 4, 1),), attributes={"axis": 1, "onesided": 1}, id="one-sided"),
    Case("DFT", ((1, 4, 4, 2),), attributes={"inverse": 1, "onesided": 1}, id="back to real"),
    Case("DFT", ((1, 4, 6, 2),), attributes={"inverse": 1, "dft_length": 8}, id="padded"),
    Case("DFT", ((1, 4, 6, 1),), attributes={"onesided": 1, "dft_length": 5}, id="cut"),
    Case("STFT", ((1, 12, 1), None, (4,)), attributes={"frame_step": 2}),
    Case("STFT", ((1, 13, 2),), attributes={"frame_step": 3, "frame_length": 5, "onesided": 0}, id="complex"),
    Case("STFT", ((1, 12), None, (6,)), attributes={"frame_step": 4, "onesided": 0}, id="two dims"),
]  # fmt: skip

POOLS = [
    Case("MaxPool", ((1, 4, 8, 8),), attributes={"kernel_shape": (2, 2), "strides": (2, 2)}),
    Case("MaxPool", ((1, 4, 8, 8),), attributes={"kernel_shape": (2, 2)}, outputs=("y0", "y1"), id="places"),
    Case("MaxPool", ((1, 4, 8, 8),), attributes={"kernel_shape": (2, 2), "within_channels": 1}, outputs=("y0", "y1"),
         id="places within channels"),
    Case("MaxUnpool", ((1, 4, 4, 4), (1, 4, 4, 4)), (0, 0), {"target": (8, 8), "within_channels": 1}, data={1: 64}),
    Case("MaxUnpool", ((1, 4, 3), (1, 4, 3)), (0, 0), {"kernel_shape": (2,), "strides": (2,)}, data={1: 24}, id="1-D"),
    Case("AveragePool", ((1, 4, 7, 7),), attributes={"kernel_shape": (3, 3), "strides": (2, 2), "ceil_mode": 1}),
    Case("AveragePool", ((1, 4, 8),), attributes={"kernel_shape": (3,), "pads": (1, 1), "count_include_pad": 1},
         id="1-D"),
    Case("Col2Im", ((1, 16, 12),), attributes={"image_shape": (5, 4), "block_shape": (2, 2)}),
    Case("Col2Im", ((1, 24, 9),), id="strides", attributes={"image_shape": (5, 6), "block_shape": (2, 3),
         "strides": (2, 3), "pads": (1, 2, 0, 1), "dilations": (1, 1)}),
    Case("LpPool", ((1, 4, 8, 8),), attributes={"kernel_shape": (2, 2)}),
    *[Case(k, ((1, 4, 6, 8),)) for k in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")],
    *[Case("Resize", ((1, 4, 6, 6),), attributes={"target": (1, 4, 9, 3), "mode": m}, id=m)
      for m in ("nearest", "linear", "cubic")],
    Case("Upsample", ((1, 4, 6, 6),), attributes={"target": (1, 4, 12, 12)}, opset=9),
    *[Case("GridSample", ((1, 4, 6, 8), (1, 3, 5, 2)), (0, 0), {"mode": m, "padding_mode": p, "align_corners": a}, id=m,
           data={1: (-1.2, 1.2)}) for m, p, a in (("linear", "zeros", 0), ("nearest", "border", 1),
                                                  ("cubic", "reflection", 0))],
    Case("GridSample", ((1, 4, 3, 4, 5), (1, 2, 3, 4, 3)), (0, 0), data={1: (-1.2, 1.2)}, id="3-D"),
    Case("AffineGrid", ((1, 2, 3),), attributes={"size": (1, 4, 5, 6)}),
    Case("AffineGrid", ((1, 3, 4),), attributes={"size": (1, 4, 2, 5, 6), "align_corners": 1}, id="3-D"),
    *[Case("Pad", ((1, 4, 6),), attributes={"pads": (0, 0, 1, 0, 0, 2), **more}, id=str(more))
      for more in ({}, {"value": 3.0}, {"mode": "reflect"}, {"mode": "edge"})],
]  # fmt: skip

LOOKUPS = [
    Case("Gather", ((12, 6), (1, 4)), (None, 0), {"axis": 0}, (0,), data={1: 12}),
    Case("Gather", ((1, 4, 6), (8,)), (0, None), {"axis": 1}, data={1: 4}, id="columns"),
    Case("Gather", ((12, 6), (4,)), (None, None), {"axis": 1}, (0,), data={1: 6}, id="no batch"),
    Case("Gather", ((1, 4, 6),), attributes={"axis": 1, "indices": 2}, id="one"),
    Case("GatherElements", ((1, 4, 6), (1, 4, 2)), (0, 0), {"axis": 2}, data={1: 6}),
    Case("GatherND", ((1, 4, 6, 8), (1, 4, 3, 1)), (0, 0), {"batch_dims": 2}, data={1: 6}),
    Case("GatherND", ((4, 6, 8), (1, 3, 2)), (None, 0), data={1: 4}, id="shared data"),
    *[Case("ScatterElements", ((1, 4, 6), (1, 4, 2), (1, 4, 2)), (0, 0, 0), {"axis": 1, "reduction": r}, data={1: 4},
           id=r) for r in ("add", "mul")],
    Case("Scatter", ((1, 4, 6), (1, 1, 6), (1, 1, 6)), (0, 0, 0), {"axis": 1}, data={1: 4}),
    Case("ScatterND", ((4, 6), (3, 1), (3, 6)), (None, None, None), {"reduction": "add"}, data={1: 4}),
    Case("ScatterND", ((4, 1, 6), (3, 1), (3, 1, 6)), (1, None, 1), {"reduction": "add"}, data={1: 4}, id="rows"),
    Case("OneHot", ((1, 4),), attributes={"depth": 6, "values": (0.0, 1.0), "axis": -1}, data={0: 6}),
]  # fmt: skip

EXPERTS = [
    *[Case(DISPATCH, (tokens, chosen), batch, {"num_experts": 4, "capacity": c}, data={1: 4}, id=name)
      for tokens, chosen, batch, c, name in (
        ((1, 6, 8), (1, 6, 2), (0, 0), 4, ""), ((6, 8), (6, 2), (0, 0), 2, "merged"),
        ((6, 1, 8), (6, 1, 2), (1, 1), 4, "batch behind"), ((6, 8), (6, 2), (None, None), 1, "no batch"))],
    *[Case(DISPATCH, (tokens, chosen), batch, {"num_experts": 4, "capacity": 2, "groups": 4}, data={1: 4}, id=name)
      for tokens, chosen, batch, name in (
        ((1, 8, 6), (1, 8, 2), (0, 0), "groups"), ((8, 1, 6), (8, 1, 2), (1, 1), "groups, batch behind"))],
    Case(PRODUCT, ((4, 3, 6), (4, 6, 8)), (1, None), {"num_tokens": 12}, (1,)),
    Case(PRODUCT, ((4, 4, 3, 6), (4, 6, 8)), (2, None), {"num_tokens": 48}, (1,), id="groups"),
    Case(COMBINE, ((4, 4, 2, 8), (1, 8, 2), (1, 8, 2)), (2, 0, 0), data={1: 4}, id="groups"),
    *[Case(COMBINE, (slots, chosen, chosen), batch, data={1: 4}, id=name)
      for slots, chosen, batch, name in (
        ((4, 4, 8), (1, 6, 2), (1, 0, 0), ""), ((4, 2, 8), (6, 2), (1, 0, 0), "merged"),
        ((4, 4, 8), (2, 3, 1, 2), (1, 2, 2), "batch behind"), ((4, 1, 8), (6, 2), (None, None, None), "no batch"))],
]  # fmt: skip
"""Experts are chosen more often than they have slots."""

SHAPES = [
    Case("Reshape", ((1, 4, 6),), attributes={"shape": (1, 4, 2, 3)}, id="heads"),
    Case("Reshape", ((1, 4, 6),), attributes={"shape": (4, 6)}, id="merge batch"),
    Case("Reshape", ((4, 6),), attributes={"shape": (4, 2, 3)}, id="keep merged"),
    Case("Reshape", ((1, 2, 4, 6),), attributes={"shape": (1, 8, 6)}, id="merge"),
    Case("Reshape", ((1, 6, 4),), attributes={"shape": (1, 8, 3)}, id="no common factor"),
    Case("Reshape", ((4, 6),), (None,), {"shape": (4, 2, 3)}, id="no batch"),
    Case("Flatten", ((1, 4, 6),), attributes={"axis": 1}), Case("Squeeze", ((1, 1, 6),), attributes={"axes": (1,)}),
    Case("Unsqueeze", ((1, 4, 6),), attributes={"axes": (0, 2)}), unary("Transpose", perm=(0, 2, 1, 3)),
    Case("Transpose", ((1, 4, 6),), attributes={"perm": (1, 0, 2)}, id="batch"),
    Case("Slice", ((1, 4, 6),), attributes={"starts": (1,), "ends": (3,), "axes": (1,), "steps": (1,)}),
    Case("Slice", ((1, 4, 6),), attributes={"starts": (-1,), "ends": (-9,), "axes": (2,), "steps": (-1,)},
         id="reversed"),
    Case("Split", ((1, 4, 6),), attributes={"axis": 2, "split": (2, 4)}, outputs=("y0", "y1")),
    Case("Concat", ((1, 4, 6), (1, 2, 6)), (0, 0), {"axis": 1}),
    Case("Expand", ((1, 1, 6),), attributes={"shape": (1, 4, 6)}),
    Case("Expand", ((1, 4),), (None,), {"shape": (1, 4), "batch_dim": 0}, id="over samples"),
    Case("Tile", ((1, 4, 6),), attributes={"repeats": (1, 2, 1)}),
    Case("DepthToSpace", ((1, 8, 2, 2),), attributes={"blocksize": 2}),
    Case("SpaceToDepth", ((1, 2, 4, 4),), attributes={"blocksize": 2}),
]  # fmt: skip

LSTM = ((1, 12, 4), (1, 12, 3), (1, 24))
ATTENTION = [
    Case("Attention", (X,) * 3, (0, 0, 0)), Case("Attention", (X,) * 3, (None,) * 3, id="no batch"),
    Case("Attention", ((1, 4, 6, 8), (1, 2, 4, 8), (1, 2, 4, 6)), (0, 0, 0), id="grouped, wide"),
    Case("Attention", ((1, 6, 32), (1, 6, 16), (1, 6, 16)), (0, 0, 0), {"q_num_heads": 4, "kv_num_heads": 2},
         id="merged heads"),
    Case("Attention", ((1, 6, 32), (1, 6, 8), (1, 6, 8)), (0, 0, 0), {"q_num_heads": 4, "kv_num_heads": 1},
         id="one kv head"),
    Case("Attention", (*[X] * 3, (6, 6)), (0, 0, 0, None), {"scale": 0.5, "softcap": 2.0}, id="mask"),
    Case("Attention", (*[X] * 3, (1, 4, 6, 6)), (0, 0, 0, 0), data={3: bool}, id="boolean mask"),
    Case("Attention", (X,) * 3, (0, 0, 0), {"is_causal": 1}, id="causal"),
    Case("Attention", (X,) * 3, (0, 0, 0), {"is_causal": 1, "left_window_size": 2}, id="window"),
    Case("LinearAttention", ((1, 5, 12), (1, 5, 6), (1, 5, 8)), (0, 0, 0), {"q_num_heads": 4, "kv_num_heads": 2,
         "update_rule": "linear"}, id="two queries a key"),
    Case("LinearAttention", (*((1, 5, 12),) * 3, None, (1, 5, 4), (1, 5, 4)), (0, 0, 0, None, 0, 0),
         {"q_num_heads": 4, "kv_num_heads": 4}, outputs=("y0", "y1"), id="gated delta rule"),
    Case("LinearAttention", (*((1, 5, 12),) * 3, None, (1, 5, 12), (1, 5, 1)), (0, 0, 0, None, 0, 0),
         {"q_num_heads": 4, "kv_num_heads": 4, "chunk_size": 2}, id="a decay for each element of keys"),
    Case("automap.LinearAttention", (*((1, 5, 12),) * 3, None, None, (1, 5, 4)), (0, 0, 0, None, None, 0),
         {"q_num_heads": 4, "kv_num_heads": 4, "update_rule": "delta"}, id="delta rule"),
    Case("automap.SelectiveScan", ((1, 6, 5), (1, 6, 5), (6, 3), (1, 3, 5), (1, 3, 5)), (0, 0, None, 0, 0)),
    Case("RotaryEmbedding", ((1, 4, 6, 8), (1, 6, 4), (1, 6, 4)), (0, None, None)),
    Case("RotaryEmbedding", ((1, 6, 32), (12, 4), (12, 4), (1, 6)), (0, None, None, 0),
         {"num_heads": 4, "interleaved": 1}, data={3: 12}, id="positions"),
    Case("LSTM", ((5, 1, 4), *LSTM), (1, None, None, None), {"hidden_size": 3}, outputs=("y0", "y1", "y2")),
    Case("LSTM", ((5, 1, 4), *LSTM, (1,), (1, 1, 3), (1, 1, 3), (1, 9)), (1, None, None, None, 0, 1, None, None),
         {"hidden_size": 3}, outputs=("", "y1"), data={4: (1, 6)}, id="all operands"),
    Case("GRU", ((1, 5, 4), (2, 9, 4), (2, 9, 3), (2, 18)), attributes={"hidden_size": 3, "direction": "bidirectional",
         "layout": 1, "linear_before_reset": 1}),
    Case("RNN", ((5, 1, 4), (1, 3, 4), (1, 3, 3)), (1, None, None), {"hidden_size": 3, "direction": "reverse"}),
]  # fmt: skip

LOSSES = [
    *[Case("SoftmaxCrossEntropyLoss", ((1, 6, 8), (1, 6)), (0, 0), {"class_dim": 2, "reduction": r}, data={1: 8}, id=r)
      for r in ("sum", "mean", "none")],
    Case("SoftmaxCrossEntropyLoss", ((1, 8, 6), (1, 6), (8,)), (0, 0, None), {"ignore_index": 2},
         outputs=("y0", "y1"), data={1: 8, 2: POSITIVE}, id="weights"),
    Case("SoftmaxCrossEntropyLoss", ((4, 8), (4,)), (0, 0), {"class_dim": 1, "reduction": "sum"}, data={1: 8},
         id="merged batch"),
    Case("NegativeLogLikelihoodLoss", ((1, 8, 6), (1, 6)), (0, 0), {"reduction": "sum"}, data={1: 8}),
    Case("MeanSquaredErrorLoss", ((1, 4, 6), (1, 4, 6)), (0, 0)),
]  # fmt: skip

SOURCES = [
    Case("Constant", (), (), {"shape": (4, 6), "dtype": "float32", "value": 2.0}),
    Case("ConstantOfShape", (), (), {"shape": (4, 6), "dtype": "float32", "value": 1.0}),
    Case("Range", (), (), {"start": 0, "limit": 8, "delta": 2}), Case("EyeLike", ((4, 6),), (None,)),
    Case("RandomNormal", (), (), {"shape": (4, 6), "scale": 0.0}), Case("RandomUniform", (), (), {"shape": (4, 6),
         "low": 1.0, "high": 1.0}),
    unary("RandomNormalLike", scale=0.0, mean=2.0), unary("RandomUniformLike", low=1.0, high=1.0),
    unary("Bernoulli", (1.0, 1.0)),
]  # fmt: skip

CASES = [
    *ELEMENTWISE, *CONTRACTIONS, *NORMS, *REDUCTIONS, *POOLS, *LOOKUPS, *EXPERTS, *SHAPES, *ATTENTION, *LOSSES,
    *SOURCES,
]  # fmt: skip

NEVER_SPLIT = {
    "Constant": "every rank makes its own",
    "ConstantOfShape": "every rank makes its own",
    "Range": "every rank makes its own",
    "EyeLike": "the position decides",
    "RandomNormal": "every rank must draw the same numbers",
    "RandomUniform": "every rank must draw the same numbers",
}
"""Kinds whose rule has no split signature, with the reason."""

NOT_EXECUTED = {
    "ir.operators.measured": "a layer of which only sizes and times are known",
}
"""Modules of kinds that no function computes, with the reason."""
