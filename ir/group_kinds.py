"""Kinds of operators that may be in a fused group, by their place in it; see `ir.groups`."""

PRODUCTS = {"MatMul", "Einsum", "Gemm"}
"""Kinds that multiply two matrices."""
SCORES = {
    "Add", "Sub", "Mul", "Div", "Where", "Cast", "Tanh", "Clip", "Max", "Min", "Identity", "Reshape", "Unsqueeze",
    "Squeeze", "Dropout", "Neg", "Concat", "Pad", "ReduceMax",
}  # fmt: skip
"""Kinds that may be between the scores and their softmax: scale, mask, bias, soft cap, windows, sinks beside keys.
Sinks that are the same number for all are a `Pad`."""
WEIGHTS = {
    "IsNaN", "Where", "Cast", "Dropout", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Mul", "Expand", "Slice",
    "ReduceSum", "Greater", "Div",
}  # fmt: skip
"""Kinds that may be between the softmax and the product with the values; `IsNaN`, `Where` guard rows without keys, a
`Slice` leaves out what sinks took, and a sum and a quotient make weights of what a mask left (jax2onnx)."""
LAYOUT = {"Transpose", "Expand", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Cast", "Mul", "Div"}
"""Kinds that may be before an operand of attention: a fused kernel reads strided heads and repeats kv heads itself."""
POINTWISE = {"Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Reciprocal", "Cast", "Identity", "Neg", "Exp", "Log", "Abs"}
CURVES = {"Erf", "Erfc", "Tanh", "Sigmoid", "Softplus", "Relu", "Gelu", "Swish", "HardSigmoid", "Clip", "Min", "Max"}
REDUCTIONS = {"ReduceMean", "ReduceSum", "ReduceL2", "ReduceSumSquare", "GlobalAveragePool"}
"""Kinds of statistics; TensorFlow's optimizer writes the mean over the last of three dims as a pooling."""
STATISTICS = {"Reshape", "Unsqueeze", "Squeeze", "Expand", "Clip"}
"""Kinds that may be on the way of a statistic back to the elements: PyTorch writes the dim of `x.var` and `x.std` by a
Reshape, and `normalize` holds the length above zero and repeats it."""
ROTATIONS = {
    "Slice", "Split", "Neg", "Concat", "Mul", "Add", "Sub", "Reshape", "Unsqueeze", "Squeeze", "Gather", "Cast",
    "Transpose", "Identity",
}  # fmt: skip
PICKS = {
    "LogSoftmax", "Softmax", "Log", "NegativeLogLikelihoodLoss", "GatherElements", "Neg", "ReduceMean", "ReduceSum",
    "Squeeze", "Unsqueeze", "Where", "Cast", "Mul", "Div", "Add", "Reshape", "Sub", "Exp", "ReduceMax", "Identity",
    "SoftmaxCrossEntropyLoss", "ReduceLogSumExp", "Gather", "Slice", "Pow",
}  # fmt: skip
"""Kinds of a cross-entropy in small steps; `Gather` and `Slice` drop the dim of the one score that was picked."""
SAME_SCORES = {"Cast", "Identity", "Reshape"}
"""Kinds that leave the scores of a loss what they are."""
PICKED = {"GatherElements", "Gather", "Squeeze", "Clip", "Add"}
"""Kinds that may be between a softmax and the logarithm of one of its probabilities, which is held above zero."""
