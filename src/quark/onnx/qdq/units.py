"""Changes of units at the edges of a model: eight bits over temperatures in kelvin and humidities leave no humidity.

    x → Sub(mean) → Div(deviation) → layer              channels in units of their own: a scaler, an observation
    layer → Mul(deviation) → Add(mean) → y              the same backwards
    x → Sub(mean of x) → Div(deviation of x) → layer    every sample in units of its own
    x, sigma → Mul(1 / sqrt(sigma² + 1)) → layer        the same, of an input beside it
    x → LayerNormalization → layer                      the same as one operator
    x → Div(smoothed x) → layer                         every place in units of its own, as gain control does
    layer → Mul(deviation of x) → Add(mean of x) → y    and backwards
    x → layer, layer → y                                weights that hold all this themselves

One scale for all of them follows the largest, and a model's inputs and outputs mean something one by one: the error of
the largest says nothing of the others. Such nodes stay float, from the input to where all is alike, and from where it
ends to the output. A change of units by constants counts where it loses five bits: pictures are far from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.ir.surgery import constant_array, constant_shape, float_attribute, int_attribute, is_constant
from quark.onnx.graph.shapes import static_shape
from quark.onnx.qdq.decoding import is_layer, tail
from quark.onnx.qdq.op_rules import MOVES_VALUES
from quark.onnx.qdq.slots import is_float

REASON = "it changes units channel by channel or sample by sample: one scale would leave the small ones nothing"
#: How far the largest reaches, in widths of the smallest, that one scale may have to hold (pictures: 3 to 6).
_REACH = 32.0
#: Widths around its middle in which a channel's values are.
_WIDTHS = 3.0
#: The same of a layer's own weights: such a channel never moves by half a step of eight bits.
_LOST = 2 * 127 * _WIDTHS
#: Layer -> the axes of its weight that count results and features.
_WEIGHTS = {"Conv": (0, 1), "Gemm": (1, 0), "MatMul": (1, 0)}
_WEIGHT_LIMIT, _CHANNELS = 1 << 22, 64
_AFFINE = frozenset(["Add", "BatchNormalization", "Div", "Mul", "Sub"])
_SIZE_LIMIT = 1 << 16
#: Operators that normalize by figures of their own.
_NORMS = frozenset(
    [
        "GroupNormalization",
        "InstanceNormalization",
        "LayerNormalization",
        "LpNormalization",
        "MeanVarianceNormalization",
        "RMSNormalization",
        "SimplifiedLayerNormalization",
    ]
)


def changes_units(model: ir.Model) -> set[ir.Node]:
    """The nodes between inputs and layers, and between layers and outputs, that change units."""
    behind, front = tail(model), _front(model)
    found = {node for value in model.graph.inputs for node in _from_input(value, front)}
    found |= {node for value in model.graph.outputs for node in _to_output(value, behind)}
    if sum(map(is_layer, model.graph)) > 1:  # of a model that is one layer nothing would be left
        found |= {node for value in model.graph.inputs for node in _reading(value)}
        found |= {node for value in model.graph.outputs for node in _making(value)}
    return found | _by_sample(model, front, behind)


@dataclass(frozen=True)
class _Change:
    """factor * x + offset, both with one number per channel at most."""

    factor: np.ndarray
    offset: np.ndarray

    def after(self, first: _Change) -> _Change | None:
        """Both, one after the other; ``None`` where their numbers are along other axes."""
        if len({one.factor.shape for one in (self, first) if one.factor.size > 1}) > 1:
            return None
        return _Change(self.factor * first.factor, self.factor * first.offset + self.offset)

    def back(self) -> _Change:
        return _Change(1 / self.factor, -self.offset / self.factor)

    def loses(self) -> bool:
        """Whether what it makes of values around 1 has too different widths, or is too far from 0, for one scale."""
        width = np.abs(self.factor)
        reach = np.abs(self.offset) + _WIDTHS * width
        return bool(np.isfinite(reach).all() and reach.max() > _REACH * width.min())


_SAME = _Change(np.ones(()), np.zeros(()))


def _from_input(value: ir.Value, front: set[ir.Node]) -> set[ir.Node]:
    """The nodes from an input on, as far as they bring it to one unit."""
    found, ahead = set[ir.Node](), [(value, _SAME, set[ir.Node]())]
    while ahead:
        one, change, path = ahead.pop()
        for node in (use.node for use in one.uses()):
            step = _change(node, one) if node in front else None
            whole, nodes = None if step is None else step.after(change), path | {node}
            if whole is None:
                continue
            if np.all(whole.factor) and whole.back().loses():
                found |= nodes
            ahead.append((node.outputs[0], whole, nodes))
    return found


def _to_output(value: ir.Value, behind: set[ir.Node]) -> set[ir.Node]:
    """The nodes before an output, as far as they bring it out of one unit."""
    change, path, node = _SAME, set[ir.Node](), value.producer()
    while node is not None and node in behind:
        source = next((one for one in node.inputs if one is not None and not is_constant(one)), None)
        step = None if source is None else _change(node, source)
        whole = None if step is None else change.after(step)
        if whole is None or source is None:
            break
        change, path, node = whole, path | {node}, source.producer()
    return path if path and np.all(change.factor) and change.loses() else set()


# ---- units in the weights of the first and the last layer ------------------------------------------------------------


def _reading(value: ir.Value) -> set[ir.Node]:
    """The layers that read an input, perhaps moved, and bring its features to one unit by their weights."""
    found, ahead = set[ir.Node](), [value]
    while ahead:
        one = ahead.pop()
        for use in one.uses():
            if use.node.op_type in MOVES_VALUES and use.idx == 0:
                ahead += use.node.outputs
            if use.idx == 0 and _is_unlike(_norms(use.node, 1)):
                biases = (after.node for after in use.node.outputs[0].uses() if _added_to(after.node) is not None)
                found |= {use.node, *biases}
    return found


def _making(value: ir.Value) -> set[ir.Node]:
    """The layer that makes an output whose channels have units of their own, and the bias that is added behind it."""
    node = _unmoved(value).producer()
    source = None if node is None else _added_to(node)
    found = {one for one in (node, None if source is None else _unmoved(source).producer()) if one is not None}
    return found if any(_is_unlike(_norms(one, 0)) for one in found) else set()


def _is_unlike(norms: np.ndarray | None) -> bool:
    """Whether one scale would leave the smallest nothing; vocabularies have rows of all sizes, which mean no units."""
    return norms is not None and norms.size <= _CHANNELS and bool(norms.max() > _LOST * norms.min())


def _unmoved(value: ir.Value) -> ir.Value:
    """What a tensor is moved from."""
    maker = value.producer()
    while maker is not None and maker.op_type in MOVES_VALUES and maker.inputs[0] is not None:
        value, maker = maker.inputs[0], maker.inputs[0].producer()
    return value


def _added_to(node: ir.Node) -> ir.Value | None:
    """What a node adds a constant per channel to."""
    given = _given(node)
    return given[0] if node.op_type == "Add" and len(given) == 1 and _change(node, given[0]) is not None else None


def _norms(node: ir.Node, side: int) -> np.ndarray | None:
    """How wide the results of a layer are, or how strongly it reads its features, by its weight; those that are 0 are
    left out."""
    weight = node.inputs[1] if node.op_type in _WEIGHTS and not node.domain else None
    shape = None if weight is None else static_shape(weight)
    if shape is None or not len(shape) > 1 or prod(shape) > _WEIGHT_LIMIT or int_attribute(node, "group", 1) != 1:
        return None
    array = constant_array(weight)
    if array is None or not array.size or array.dtype.kind != "f" or (node.op_type == "MatMul" and array.ndim != 2):
        return None
    axis = _WEIGHTS[node.op_type][side] ^ int_attribute(node, "transB", 0)
    rows = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    norms = norms[norms > 0]
    return norms if norms.size and np.isfinite(norms).all() else None


def _change(node: ir.Node, value: ir.Value) -> _Change | None:
    """What a node makes of one of its inputs, the others being constants; ``None`` where that is no change of units."""
    others = [one for one in node.inputs if one is not value]
    numbers = [array for one in others if (array := _per_channel(one)) is not None]
    if node.op_type not in _AFFINE or len(numbers) != len(node.inputs) - 1:
        return None
    if node.op_type == "BatchNormalization":
        rank = 2 if value.shape is None else len(value.shape)
        scale, bias, mean, variance = (one.reshape(-1, *[1] * (rank - 2)) for one in numbers)
        factor = scale / np.sqrt(variance + float_attribute(node, "epsilon", 1e-5))
        return _Change(factor, bias - mean * factor)
    number, first = numbers[0], node.inputs[0] is value
    one, nothing = np.ones_like(number), np.zeros_like(number)
    if node.op_type == "Mul":
        return _Change(number, nothing)
    if node.op_type == "Div":
        return _Change(1 / number, nothing) if first and np.all(number) else None
    if node.op_type == "Add":
        return _Change(one, number)
    return _Change(one, -number) if first else _Change(-one, number)


def _per_channel(value: ir.Value | None) -> np.ndarray | None:
    """A constant number, or numbers along one axis."""
    shape = constant_shape(value)
    if shape is None or prod(shape) > _SIZE_LIMIT or max(shape, default=1) != prod(shape):
        return None
    array = constant_array(value)
    if array is None or array.dtype.kind != "f":
        return None
    behind = array.ndim - int(np.argmax(array.shape)) if array.size > 1 else 0  # of the axis
    return array.astype(np.float64).reshape([-1, *[1] * (behind - 1)] if behind else array.shape)


def _front(model: ir.Model) -> set[ir.Node]:
    """The nodes without a layer before them, but for what follows from constants alone."""
    found: set[ir.Node] = set()
    for node in model.graph:
        given = [value for value in node.inputs if value is not None and not is_constant(value)]
        if given and not is_layer(node) and all(one.is_graph_input() or one.producer() in found for one in given):
            found.add(node)
    return found


def _by_sample(model: ir.Model, front: set[ir.Node], behind: set[ir.Node]) -> set[ir.Node]:
    """The nodes that read a figure of a sample as a unit, those that make it, and what is summed up in the end."""
    found, measured = set[ir.Node](), set[ir.Node]()
    leads = _leads(model, behind)
    for node in model.graph:
        if node in front and any(_is_measured(value) or value.producer() in measured for value in _given(node)):
            measured.add(node)
        figures = [value for value in _given(node) if _is_figure(value, node, front)]
        ahead = node in measured and node in leads
        if ahead and node.op_type in _NORMS:
            found |= {node, *_makers(_given(node))}
        elif figures and (node in behind or (ahead and any(_normalizes(value, node) for value in figures))):
            found |= {node, *_makers(figures)}
        elif node in behind and node.op_type in _AFFINE and any(one.producer() in found for one in _given(node)):
            found.add(node)
    return found


def _is_measured(value: ir.Value) -> bool:
    """Whether a tensor is an input of numbers; what indices choose, such as embeddings, has no unit."""
    return value.is_graph_input() and is_float(value)


def _leads(model: ir.Model, behind: set[ir.Node]) -> set[ir.Node]:
    """The nodes from which a layer is reached, or what is behind the last one."""
    found: set[ir.Node] = set()
    for node in reversed(list(model.graph)):
        readers = (use.node for value in node.outputs for use in value.uses())
        if any(is_layer(reader) or reader in found or reader in behind for reader in readers):
            found.add(node)
    return found


def _is_figure(value: ir.Value, node: ir.Node, front: set[ir.Node]) -> bool:
    """Whether a node shifts or scales by a tensor computed from inputs: one with fewer values than the other, or
    a divisor, which may follow it place by place."""
    if node.op_type not in _AFFINE - {"BatchNormalization"} or len(_given(node)) != 2:
        return False
    other = node.inputs[1 - list(node.inputs).index(value)]
    divides = node.op_type == "Div" and value is node.inputs[1]
    return _computed(value, front) and (divides or _is_spread(_sizes(value), _sizes(other)))


def _normalizes(figure: ir.Value, node: ir.Node) -> bool:
    """Whether a node takes a figure off or divides by it, perhaps as a sum or product with its inverse; a gate does
    not."""
    return node.op_type in ("Div", "Sub") or any(_inverts(maker, node.op_type) for maker in _makers([figure]))


def _inverts(node: ir.Node, joined: str) -> bool:
    """Whether a node makes the inverse of a figure for a sum (``Add``) or for a product (``Mul``)."""
    if joined == "Add":
        return node.op_type == "Neg"
    if node.op_type == "Pow":
        exponent = constant_array(node.inputs[1])
        return exponent is None or bool((exponent < 0).any())
    divides = node.op_type == "Div" and not is_constant(node.inputs[1])
    return divides or node.op_type in ("Exp", "Reciprocal")


def _computed(value: ir.Value, front: set[ir.Node]) -> bool:
    """Whether a tensor is made of inputs by more than moves."""
    maker = _unmoved(value).producer()
    return maker is not None and maker in front


def _is_spread(small: tuple[int | None, ...], large: tuple[int | None, ...]) -> bool:
    """Whether a tensor of one shape is repeated to meet another."""
    pairs = list(zip(reversed(small), reversed(large), strict=False))
    repeated = any(a == 1 and b != 1 for a, b in pairs)
    return (repeated or len(small) < len(large)) and all(a == 1 or b != 1 for a, b in pairs)


def _sizes(value: ir.Value | None) -> tuple[int | None, ...]:
    """The sizes of a tensor, ``None`` for free ones."""
    shape = () if value is None or value.shape is None else tuple(value.shape)
    return tuple(size if isinstance(size, int) else None for size in shape)


def _given(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None and not is_constant(value)]


def _makers(values: list[ir.Value]) -> Iterator[ir.Node]:
    """All that tensors are computed from."""
    seen, ahead = set[ir.Node](), [value.producer() for value in values]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            ahead += [value.producer() for value in node.inputs if value is not None]
