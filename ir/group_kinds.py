"""Kinds of operators that may be in a fused group, by their place in it; see `ir.groups`."""

PRODUCTS = {"MatMul", "Einsum", "Gemm"}
"""Kinds that multiply two matrices."""
SCORES = {
    "Add", "Sub", "Mul", "Div", "Where", "Cast", "Tanh", "Clip", "Max", "Min", "Identity", "Reshape", "Unsqueeze",
    "Squeeze", "Dropout", "Neg", "Concat", "Pad", "ReduceMax",
}  # fmt: skip
"""Kinds that may be between the scores and their softmax: scale, mask, bias, soft cap, windows, and attention sinks
beside the keys. Sinks that are one constant are written as a `Pad`."""
WEIGHTS = {
    "IsNaN", "Where", "Cast", "Dropout", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Mul", "Expand", "Slice",
    "ReduceSum", "Greater", "Div",
}  # fmt: skip
"""Kinds that may be between the softmax and the product with the values. `IsNaN` and `Where` handle rows without keys,
a `Slice` removes the weights of sinks, and a sum and a quotient normalise the weights after a mask (jax2onnx)."""
LAYOUT = {"Transpose", "Expand", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Cast", "Mul", "Div"}
"""Kinds that may be before an operand of attention: a fused kernel reads strided heads and repeats kv heads itself."""
POINTWISE = {"Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Reciprocal", "Cast", "Identity", "Neg", "Exp", "Log", "Abs"}
CURVES = {"Erf", "Erfc", "Tanh", "Sigmoid", "Softplus", "Relu", "Gelu", "Swish", "HardSigmoid", "Clip", "Min", "Max"}
REDUCTIONS = {"ReduceMean", "ReduceSum", "ReduceL2", "ReduceSumSquare", "GlobalAveragePool"}
"""Kinds that compute statistics; TensorFlow's graph optimizer writes the mean over the last of three dims as a
pooling."""
STATISTICS = {"Reshape", "Unsqueeze", "Squeeze", "Expand", "Clip"}
"""Kinds that may be between a statistic and the elements to which it is applied: PyTorch restores the dim of `x.var`
and `x.std` by a Reshape, and `normalize` clips the length above zero and expands it."""
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
"""Kinds that do not change the scores of a loss."""
PICKED = {"GatherElements", "Gather", "Squeeze", "Clip", "Add"}
"""Kinds that may be between a softmax and the logarithm of one of its probabilities, which is kept above zero."""
