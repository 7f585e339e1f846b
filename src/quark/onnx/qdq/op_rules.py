"""Which slots of which operator are quantized: one row per operator.

A row is all that placement knows of an operator. Rows follow the patterns that ONNX Runtime fuses into integer kernels
(QLinearConv, QLinearMatMul, QGemm, QLinearAdd, QLinearConcat, …) and that NPU compilers know.
"""

from __future__ import annotations

from typing import Literal

from quark.dataclass import dataclass

#: own: the output has a range of its own; same: it shares the parameters of the data input; none: not a float tensor.
Output = Literal["own", "same", "none"]
#: base: quantized by default; extended: also in NPU and extended-type flows; extra: only when the user asks for it.
OpSet = Literal["base", "extended", "extra"]


@dataclass(frozen=True)
class OpRule:
    """Slots of an operator.

    Attributes:
        data: positions of inputs quantized as activations; ``None`` means every input.
        weight: position of the input quantized as a weight when it is constant.
        channel_axis: axis of that weight that gets a scale per channel.
        reduce_axis: axis of that weight that is summed over, which groups run along.
        bias: position of the bias.
        parameters: positions of constant inputs quantized like weights, one scale each.
        output: how the outputs are quantized.
        fixed_range: output range known without data.
        op_set: when the operator belongs to the chosen set.
    """

    data: tuple[int, ...] | None = (0,)
    weight: int | None = None
    channel_axis: int = 0
    reduce_axis: int = 1
    bias: int | None = None
    parameters: tuple[int, ...] = ()
    output: Output = "own"
    fixed_range: tuple[float, float] | None = None
    op_set: OpSet = "base"


_ELEMENTWISE = OpRule(data=None)
_LAYOUT = OpRule(output="same")
_UNARY = OpRule()

OP_RULES: dict[str, OpRule] = {
    # sums of products
    "Conv": OpRule(weight=1, channel_axis=0, reduce_axis=1, bias=2),
    "ConvTranspose": OpRule(weight=1, channel_axis=1, reduce_axis=0, bias=2),
    "Gemm": OpRule(weight=1, channel_axis=1, reduce_axis=0, bias=2),  # both axes swap with transB
    "MatMul": OpRule(weight=1, channel_axis=-1, reduce_axis=-2),
    # elementwise with several operands
    "Add": _ELEMENTWISE,
    "Mul": _ELEMENTWISE,
    "Sub": OpRule(data=None, op_set="extended"),
    "Div": OpRule(op_set="extended"),  # the divisor stays float: see slots.makes_divisors
    "Min": OpRule(data=None, op_set="extended"),
    "Max": OpRule(data=None, op_set="extended"),
    "Concat": _ELEMENTWISE,
    "Where": OpRule(data=(1, 2)),
    # activation functions
    "Relu": _UNARY,
    "Clip": _UNARY,
    "LeakyRelu": _UNARY,
    "PRelu": OpRule(parameters=(1,), op_set="extended"),
    "Gelu": _UNARY,
    "Tanh": _UNARY,
    "Sigmoid": _UNARY,
    "HardSigmoid": OpRule(op_set="extended"),
    "Softmax": OpRule(fixed_range=(0.0, 1.0)),
    "Erf": OpRule(op_set="extended"),
    "HardSwish": OpRule(op_set="extra"),
    "Elu": OpRule(op_set="extra"),
    "Softplus": OpRule(op_set="extra"),
    "Exp": OpRule(op_set="extra"),
    "Sqrt": OpRule(op_set="extra"),
    # reductions and normalizations
    "AveragePool": _UNARY,
    "GlobalAveragePool": _UNARY,
    "ReduceMean": OpRule(op_set="extended"),
    "InstanceNormalization": OpRule(parameters=(1,), bias=2),
    "LayerNormalization": OpRule(parameters=(1, 2)),
    "LpNormalization": OpRule(op_set="extended"),
    "BatchNormalization": OpRule(op_set="extra"),
    # recurrent: x, then weights of the input and of the state, and their biases
    "LSTM": OpRule(parameters=(1, 2, 3), op_set="extra"),
    "GRU": OpRule(parameters=(1, 2, 3), op_set="extra"),
    "RNN": OpRule(parameters=(1, 2, 3), op_set="extra"),
    # layout: the values stay what they are, so the parameters do too
    "MaxPool": _LAYOUT,
    "Reshape": _LAYOUT,
    "Flatten": _LAYOUT,
    "Transpose": _LAYOUT,
    "Squeeze": _LAYOUT,
    "Unsqueeze": _LAYOUT,
    "Resize": _LAYOUT,
    "Split": _LAYOUT,
    "Gather": _LAYOUT,
    "Pad": _LAYOUT,
    "Slice": OpRule(output="same", op_set="extended"),
    "DepthToSpace": OpRule(output="same", op_set="extended"),
    "SpaceToDepth": OpRule(output="same", op_set="extended"),
    "Expand": OpRule(output="same", op_set="extra"),
    "Tile": OpRule(output="same", op_set="extra"),
    "ArgMax": OpRule(output="none"),
}

#: For an operator without a row that the user asks for: every float input and output, each with a range of its own.
GENERIC = OpRule(data=None, op_set="extra")

#: Operators whose result may go straight into an activation function, without Q/DQ between (one kernel on the target).
FUSED_PRODUCERS = frozenset(
    ["Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "MaxPool", "AveragePool", "GlobalAveragePool"]
)
#: Operators that only move values: a mask or a constant is still one behind them.
MOVES_VALUES = frozenset(
    ["Slice", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Expand", "Gather", "Identity", "Tile", "Cast", "Split"]
)
#: Operators whose results are never negative.
NON_NEGATIVE = frozenset(["Sigmoid", "HardSigmoid", "Softmax"])
#: The unsigned format with the same number of codes.
UNSIGNED_OF = {"int4": "uint4", "int8": "uint8", "uint8": "uint8", "int16": "uint16"}
#: Operator -> position of the input that must not become 0.
DIVISORS = {"Div": 1, "Reciprocal": 0, "Log": 0}
#: Operators between a tensor and a divisor made from it: the statistics of a normalization.
MAKES_DIVISORS = frozenset(
    [
        *("Abs", "Add", "Clip", "Concat", "Max", "Mul", "Pow", "Sqrt"),
        *("ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare"),
    ]
)
#: Operators that make a network of layers: a transform of a signal has none of them.
ACTIVATES = frozenset(
    [
        *("Celu", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Relu"),
        *("Selu", "Sigmoid", "Softmax", "Softplus", "Softsign", "Swish", "Tanh", "ThresholdedRelu"),
        *("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LRN", "LayerNormalization"),
        *("LpNormalization", "MeanVarianceNormalization", "RMSNormalization"),
        *("Attention", "GRU", "GlobalMaxPool", "LSTM", "MaxPool", "RNN"),
    ]
)
