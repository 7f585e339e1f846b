"""The rules of the NPU, one row each: which operators, which positions must be where, and what moves if they are not.

With i, w, b, o the positions of input, weight, bias and output of a node:

    align_concat    Concat                     all inputs and the output at the least of their positions
    align_pool      MaxPool, AveragePool, …    the larger of i and o at the smaller; also align_pad, align_slice,
                                               align_transpose and align_reshape (on request)
    shift_read      Add, Sub                   0 <= max(i) - min(i) <= 7        the largest i moves
    shift_write     Add                        -7 <= min(i) - o <= 25           o moves
                    Mul                        0 <= sum(i) - o <= 32            o moves
    shift_cut       Conv, Gemm                 0 <= w + i - o <= 16             w moves
    shift_bias      Conv, Gemm                 low <= w + i - b <= 15           b moves
                                               low = min(0, 8 + (w + i - o) - 24), 0 before a LeakyRelu
    hard_sigmoid    HardSigmoid(1/6, 1/2)      0 <= i <= 15, o >= 7, o <= 14 + i
    shift_swish     x * HardSigmoid(x)         0 <= sum(i) - o <= 15            o moves

A rule whose positions are not all there does not apply. Rules move what the Plan says; codes are computed from it
later, so a weight that moves is rounded again from its float values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.ir.surgery import input_at, sole_consumer
from quark.onnx.npu.fixed_point import is_sixth
from quark.onnx.npu.positions import Positions

#: A tensor and where it must go.
Move = tuple[str, Any]
Moves = Callable[[ir.Node, Positions], Iterator[Move]]

READ_APART = 7
ADD_RANGE = (-7, 25)
MUL_RANGE = (0, 32)
CUT_RANGE = (0, 16)
SWISH_RANGE = (0, 15)
BIAS_TOP = 15
#: Bits of the accumulator that a bias is added in, and of the codes that it is shifted down to.
ACCUMULATOR, CODES = 24, 8


@dataclass(frozen=True)
class PositionRule:
    """One rule.

    Attributes:
        name: what ``explain`` calls it.
        option: the option that turns it off.
        op_types: the nodes it looks at.
        moves: what must move at a node.
        repeats: whether a move of it calls for another round.
    """

    name: str
    option: str
    op_types: frozenset[str]
    moves: Moves
    repeats: bool = True


def _inputs(node: ir.Node, at: Positions) -> list[str] | None:
    """The tensors of all inputs; ``None`` where one has no position."""
    names = [at.read(node, slot) for slot in range(len(node.inputs))]
    return [name for name in names if name is not None] if all(names) and names else None


def _at(at: Positions, name: str) -> Any:
    position = at.of(name)
    return 0 if position is None else position


def _to_least(names: list[str], at: Positions) -> Iterator[Move]:
    """All at the least of the positions; zeros, which every position holds, follow the others."""
    least = min(int(np.min(_at(at, name))) for name in _telling(names, at))
    yield from ((name, least) for name in names)


def _telling(names: list[str], at: Positions) -> list[str]:
    """The tensors that are not always zero; all where every one is."""
    return [name for name in names if not at.always_zero(name)] or names


def align_concat(node: ir.Node, at: Positions) -> Iterator[Move]:
    """All branches and the result at one position."""
    names, output = _inputs(node, at), at.written(node)
    if names is not None and output is not None:
        yield from _to_least([output, *names], at)


def align_same(node: ir.Node, at: Positions) -> Iterator[Move]:
    """Input and output at one position."""
    data, output = at.read(node, 0), at.written(node)
    if data is not None and output is not None:
        yield from _to_least([data, output], at)


def shift_read(node: ir.Node, at: Positions) -> Iterator[Move]:
    """The operands of a sum within seven shifts of each other; zeros beside the others."""
    names = _inputs(node, at)
    if names is None or len(names) < 2:
        return
    telling = _telling(names, at)
    positions = [int(_at(at, name)) for name in telling]
    yield from ((name, min(positions)) for name in names if name not in telling)
    if max(positions) - min(positions) > READ_APART:
        yield telling[positions.index(max(positions))], min(positions) + READ_APART


def _written_within(
    node: ir.Node, at: Positions, total: Callable[[Iterable[int]], int], bounds: tuple[int, int]
) -> Iterator[Move]:
    """The output moved so that ``total`` of the inputs' positions, less its own, lies within the bounds."""
    names, output = _inputs(node, at), at.written(node)
    if names is not None and output is not None:
        read = total(int(_at(at, name)) for name in names)
        yield output, read - int(np.clip(read - int(_at(at, output)), *bounds))


def write_add(node: ir.Node, at: Positions) -> Iterator[Move]:
    """A sum's result within the write shifter."""
    return _written_within(node, at, min, ADD_RANGE)


def write_mul(node: ir.Node, at: Positions) -> Iterator[Move]:
    """A product's result within the write shifter."""
    return _written_within(node, at, sum, MUL_RANGE)


def shift_cut(node: ir.Node, at: Positions) -> Iterator[Move]:
    """The accumulator shifted down to the output by 0 to 16 bits."""
    data, weight, output = at.read(node, 0), at.read(node, 1, channels=True), at.written(node)
    if data is not None and weight is not None and output is not None:
        away = _at(at, data) - _at(at, output)
        yield weight, np.clip(_at(at, weight) + away, *CUT_RANGE) - away


def shift_bias(node: ir.Node, at: Positions) -> Iterator[Move]:
    """The bias shifted onto the accumulator without leaving it."""
    names = [at.read(node, slot, channels=slot > 0) for slot in range(3)]
    data, weight, bias = names
    output = at.written(node)
    if data is None or weight is None or bias is None or output is None:
        return
    accumulated = _at(at, weight) + _at(at, data)
    low = np.minimum(0, CODES + (accumulated - _at(at, output)) - ACCUMULATOR)
    if _feeds_leaky_relu(node):
        low = np.zeros_like(low)
    shift = np.clip(accumulated - _at(at, bias), low, BIAS_TOP)
    moved = np.asarray(accumulated - shift)
    yield bias, moved if moved.shape == np.shape(_at(at, bias)) else moved.min()


def _feeds_leaky_relu(node: ir.Node) -> bool:
    follower = sole_consumer(node.outputs[0])
    return follower is not None and follower.op_type == "LeakyRelu"


def hard_sigmoid(node: ir.Node, at: Positions) -> Iterator[Move]:
    """The table of the device: 16 input positions, an output of at least 7 bits."""
    data, output = at.read(node, 0), at.written(node)
    if data is None or output is None or not is_sixth(node):
        return
    position = int(np.clip(_at(at, data), 0, 15))
    yield data, position
    yield output, min(max(int(_at(at, output)), 7), 14 + position)


def shift_swish(node: ir.Node, at: Positions) -> Iterator[Move]:
    """x * HardSigmoid(x), one instruction, within its own shifter."""
    names = _inputs(node, at)
    if names is not None and len(names) == 2 and _is_swish(node):
        yield from _written_within(node, at, sum, SWISH_RANGE)


def _is_swish(node: ir.Node) -> bool:
    return any(_gate_source(node.inputs[k]) is node.inputs[1 - k] for k in (0, 1))


def _gate_source(value: ir.Value | None) -> ir.Value | None:
    """What a HardSigmoid reads whose result, perhaps corrected by a constant factor, this is."""
    maker = value.producer() if value is not None else None
    if maker is not None and maker.op_type == "Mul":
        source = input_at(maker, 0)
        maker = source.producer() if source is not None else None
    return maker.inputs[0] if maker is not None and maker.op_type == "HardSigmoid" else None


#: In the order in which a round applies them.
RULES: tuple[PositionRule, ...] = (
    PositionRule("align_concat", "AlignConcat", frozenset(["Concat"]), align_concat),
    PositionRule("align_pool", "AlignPool", frozenset(["MaxPool", "AveragePool", "GlobalAveragePool"]), align_same),
    PositionRule("align_pad", "AlignPad", frozenset(["Pad"]), align_same),
    PositionRule("align_slice", "AlignSlice", frozenset(["Slice"]), align_same),
    PositionRule("align_transpose", "AlignTranspose", frozenset(["Transpose"]), align_same),
    PositionRule("align_reshape", "AlignReshape", frozenset(["Reshape"]), align_same),
    PositionRule("shift_read", "AdjustShiftRead", frozenset(["Add", "Sub"]), shift_read),
    PositionRule("shift_write", "AdjustShiftWrite", frozenset(["Add"]), write_add),
    PositionRule("shift_write", "AdjustShiftWrite", frozenset(["Mul"]), write_mul, repeats=False),
    PositionRule("shift_cut", "AdjustShiftCut", frozenset(["Conv", "Gemm"]), shift_cut),
    PositionRule("shift_bias", "AdjustShiftBias", frozenset(["Conv", "Gemm"]), shift_bias),
    PositionRule("hard_sigmoid", "AdjustHardSigmoid", frozenset(["HardSigmoid"]), hard_sigmoid),
    PositionRule("shift_swish", "AdjustShiftSwish", frozenset(["Mul"]), shift_swish),
)
