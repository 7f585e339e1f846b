"""How much of a model is quantized: the share of its multiplications in integer arithmetic, and of its weights.

    integer   every factor of a sum of products is a code: read from a DequantizeLinear of an integer type, perhaps
              moved in between; a convolution writes codes too, perhaps behind its activation function. Integer
              operators (QLinearConv, MatMulInteger, …) count as what they are.

Counted is what the graph says; a runtime without such a kernel computes in float all the same. Bodies of If and Loop
count once; attention operators as if nothing were masked, their two products as wide as the result. Not counted: an
Einsum with an ellipsis, and everything that is not a sum of products.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import numpy as np
import onnx
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.ir.surgery import input_at, int_attribute, name_of
from quark.ir.walk import nodes_within
from quark.onnx.bodies import place_of
from quark.onnx.graph import model as files
from quark.onnx.graph.libraries import Libraries
from quark.onnx.graph.quantized import DEQUANTIZE, QUANTIZE, code_type, constants_of, dequantizer
from quark.onnx.graph.run import Runner
from quark.onnx.graph.session import Runtime
from quark.onnx.graph.shapes import prove_shapes, static_shape
from quark.onnx.passes.einsum_to_matmul import terms
from quark.onnx.qdq.op_rules import MOVES_VALUES

#: Elements in a weight from which on it counts among the weights; below are scales, shapes and single numbers.
SMALLEST = 16
_ALIKE = QUANTIZE | DEQUANTIZE
_CODES = ("INT8", "UINT8", "INT16", "UINT16", "INT4", "UINT4", "INT2", "UINT2")
_ACTIVATIONS = frozenset(["Relu", "Clip", "LeakyRelu", "PRelu", "HardSwish", "HardSigmoid", "Sigmoid", "Gelu", "Tanh"])


@dataclass(frozen=True)
class Product:
    """A sum of products.

    Attributes:
        name: of its node.
        op_type: of its node.
        macs: multiplications and additions of one inference.
        integer: whether they are integer arithmetic.
    """

    name: str
    op_type: str
    macs: int
    integer: bool


@dataclass(frozen=True)
class Coverage:
    """What is quantized.

    Attributes:
        layers: the sums of products, in the order of the graph.
        weights: elements of stored weights.
        codes: of these, elements of 8 bits or fewer.
    """

    layers: tuple[Product, ...]
    weights: int
    codes: int

    @property
    def macs(self) -> int:
        """Multiplications and additions of one inference."""
        return sum(layer.macs for layer in self.layers)

    @property
    def integer(self) -> float:
        """The share of them in integer arithmetic, 0 to 1; 1 for a model that has none."""
        return sum(layer.macs for layer in self.layers if layer.integer) / self.macs if self.macs else 1.0

    @property
    def stored(self) -> float:
        """The share of the weights that are stored in 8 bits or fewer, 0 to 1; 1 for a model without weights."""
        return self.codes / self.weights if self.weights else 1.0


def coverage(
    model: str | os.PathLike[str] | onnx.ModelProto | ir.Model,
    feed: Mapping[str, np.ndarray] | None = None,
    libraries: Libraries = None,
) -> Coverage:
    """How much of a model, quantized or not, is computed in integers and stored as codes.

    Args:
        model: a path or a model; it stays as it is.
        feed: one sample, ``{input name: array}``: what free sizes are. Without one they count as 1.
        libraries: files with the model's custom operators.

    Raises:
        ModelError: the model cannot be read.
        DataError: the sample does not fit it.
    """
    opened = files.load(model)
    return _count(opened, Sizes.on(opened, feed, lambda: files.load(model), libraries))


def as_stated(model: ir.Model) -> Coverage | None:
    """The same of a model whose proved shapes it states; ``None`` where they leave a size of a layer open."""
    layers = [node for node in nodes_within(model.graph) if node.op_type in LAYERS]
    shapes = {str(value.name): _stated(value) for node in layers for value in _measured(node)}
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    return _count(model, Sizes(known)) if len(known) == len(shapes) else None


def _stated(value: ir.Value) -> tuple[int, ...] | None:
    """The sizes of a tensor as they are stated: its own, of its data, or of what it is the codes or values of."""
    while static_shape(value) is None and value.const_value is None:
        maker = value.producer()
        if maker is None or maker.op_type not in _ALIKE or maker.inputs[0] is None:
            return None
        value = maker.inputs[0]
    return static_shape(value) if value.const_value is None else tuple(value.const_value.shape.numpy())


def _count(model: ir.Model, sizes: Sizes) -> Coverage:
    nodes = dict(_placed(model.graph))
    layers = tuple(
        Product(place + name_of(node), node.op_type, kind.macs(node, sizes), kind.integer(node))
        for node, place in nodes.items()
        if (kind := LAYERS.get(node.op_type)) is not None
    )
    weights = [(one.size, one.dtype.bitwidth) for one in constants_of(model) if _is_weight(one)]
    return Coverage(layers, sum(size for size, _ in weights), sum(size for size, bits in weights if bits <= 8))


def _placed(graph: ir.Graph, place: str = "") -> Iterator[tuple[ir.Node, str]]:
    """Every node, those of bodies included, and what stands in front of its name in plans."""
    for node in graph:
        yield node, place
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from _placed(attribute.as_graph(), place + place_of(node, attribute.name))


def _is_weight(tensor: ir.TensorProtocol) -> bool:
    wide_integer = tensor.dtype.is_integer() and tensor.dtype.bitwidth > 8
    return tensor.size >= SMALLEST and len(tensor.shape) > 1 and not wide_integer


@dataclass(frozen=True)
class Sizes:
    """The shape of every tensor of a model.

    Attributes:
        seen: those that the model does not state, by name.
    """

    seen: Mapping[str, tuple[int, ...]]

    @classmethod
    def on(
        cls,
        model: ir.Model,
        feed: Mapping[str, np.ndarray] | None,
        as_written: Callable[[], ir.Model],
        libraries: Libraries = None,
    ) -> Sizes:
        """On one sample.

        Args:
            model: it learns shapes.
            feed: the sample.
            as_written: the model as it was, for a run where inference does not find every size.
            libraries: files with its custom operators.
        """
        for value in model.graph.inputs:
            if feed is not None and value.name is not None and value.name in feed:
                value.shape = ir.Shape(np.shape(feed[value.name]))
        prove_shapes(model)
        names = [] if feed is None else _unproved(model)
        # the session opens the model as it is written: ONNX Runtime (1.31) breaks off on some Ifs once sizes are fixed
        return cls({} if feed is None or not names else _observed(as_written(), names, feed, libraries))

    def of(self, value: ir.Value | None) -> tuple[int, ...]:
        """The shape; sizes that nothing tells are 1."""
        known = static_shape(value)
        if value is None or known is not None:
            return known or ()
        seen = self.seen.get(str(value.name))
        return seen or tuple(size if isinstance(size, int) else 1 for size in value.shape or ())


def _unproved(model: ir.Model) -> list[str]:
    """The tensors of layers whose shape inference does not find."""
    layers = [node for node in model.graph if node.op_type in LAYERS]
    values = [value for node in layers for value in _measured(node)]
    return [str(one.name) for one in values if one.name and one.producer() is not None and static_shape(one) is None]


def _measured(node: ir.Node) -> list[ir.Value]:
    """The tensors whose sizes say how much a layer multiplies."""
    return [value for value in (*node.inputs[:4], *node.outputs[:1]) if value is not None]


def _observed(
    model: ir.Model, names: Sequence[str], feed: Mapping[str, np.ndarray], libraries: Libraries
) -> dict[str, tuple[int, ...]]:
    """The shapes of these tensors, off one run."""
    found = Runner(model, names, runtime=Runtime(libraries=libraries)).run(feed).values
    return {name: np.shape(array) for name, array in found.items()}


# ---- the operators that multiply -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """An operator that multiplies.

    Attributes:
        macs: multiplications of a node.
        integer: whether they are integer arithmetic.
    """

    macs: Callable[[ir.Node, Sizes], int]
    integer: Callable[[ir.Node], bool]


def _convolution(weight: int, transposed: bool = False) -> Callable[[ir.Node, Sizes], int]:
    def macs(node: ir.Node, sizes: Sizes) -> int:
        places = sizes.of(node.inputs[0] if transposed else node.outputs[0])
        return prod(places) * prod(sizes.of(node.inputs[weight])[1:])

    return macs


def _product(left: int, right: int) -> Callable[[ir.Node, Sizes], int]:
    def macs(node: ir.Node, sizes: Sizes) -> int:
        a, b = sizes.of(node.inputs[left]), sizes.of(node.inputs[right])
        summed = a[-2] if int_attribute(node, "transA", 0) and len(a) > 1 else a[-1] if a else 1
        if not sizes.of(node.outputs[0]) or len(b) < 2:
            return prod(a)
        return prod(sizes.of(node.outputs[0])) * summed

    return macs


def _recurrent(node: ir.Node, sizes: Sizes) -> int:
    steps = sizes.of(node.inputs[0])[:2]
    return prod(steps) * sum(prod(sizes.of(node.inputs[position])) for position in (1, 2))


def _n_bits(node: ir.Node, sizes: Sizes) -> int:
    return prod(sizes.of(node.inputs[0])[:-1]) * int_attribute(node, "K", 1) * int_attribute(node, "N", 1)


def _attention(past: int, weight: int | None = None) -> Callable[[ir.Node, Sizes], int]:
    """Scores and their sums of values, over the keys that are given and those at ``past``; with projections or not."""

    def macs(node: ir.Node, sizes: Sizes) -> int:
        query, out = sizes.of(node.inputs[0]), sizes.of(node.outputs[0])
        separate = weight is None and input_at(node, 1) is not None
        keys = sizes.of(node.inputs[1]) if separate else query
        before = sizes.of(input_at(node, past))[-2:-1]
        length = sum((*keys[-2:-1], *before))
        projected = 0 if weight is None else prod(query[:-1]) * prod(sizes.of(node.inputs[weight]))
        return 2 * prod(out) * length + projected

    return macs


def _standard_or_packed(node: ir.Node, sizes: Sizes) -> int:
    """ONNX's own attention, or ONNX Runtime's, which holds the projections."""
    return (_attention(past=4, weight=1) if node.domain else _attention(past=4))(node, sizes)


def _einsum(node: ir.Node, sizes: Sizes) -> int:
    """As many as its indices have values together."""
    counts: dict[str, int] = {}
    for term, value in zip(terms(node)[0], node.inputs, strict=False):
        counts.update(zip(term, sizes.of(value), strict=False))
    return 0 if "." in counts else prod(counts.values())


def _reads_codes(node: ir.Node, positions: tuple[int, ...]) -> bool:
    return all(_is_code(input_at(node, position)) for position in positions)


def _is_code(value: ir.Value | None) -> bool:
    """Whether a tensor is dequantized from integers, perhaps moved since."""
    while value is not None:
        source = dequantizer(value)
        if source is not None:
            return code_type(source) in _CODES
        maker = value.producer()
        if maker is None or maker.op_type not in MOVES_VALUES or maker.op_type == "Cast":
            return False
        value = maker.inputs[0]
    return False


def _writes_codes(node: ir.Node) -> bool:
    """Whether a result is quantized, perhaps behind the activation function that is one kernel with its layer."""
    pending = [use.node for use in node.outputs[0].uses()]
    pending += [use.node for one in pending if one.op_type in _ACTIVATIONS for use in one.outputs[0].uses()]
    return any(reader.op_type in QUANTIZE for reader in pending)


def _multiplies(*positions: int) -> Callable[[ir.Node], bool]:
    return lambda node: _reads_codes(node, positions)


def _convolves(node: ir.Node) -> bool:
    return _reads_codes(node, (0, 1)) and _writes_codes(node)


def _always(node: ir.Node) -> bool:
    return True


def _never(node: ir.Node) -> bool:
    return False


def _eight_bit_inputs(node: ir.Node) -> bool:
    return int_attribute(node, "accuracy_level", 0) == 4


LAYERS: dict[str, Kind] = {
    "Conv": Kind(_convolution(1), _convolves),
    "ConvTranspose": Kind(_convolution(1, transposed=True), _convolves),
    "DeformConv": Kind(_convolution(1), _never),
    "Einsum": Kind(_einsum, _never),
    "Gemm": Kind(_product(0, 1), _multiplies(0, 1)),
    "MatMul": Kind(_product(0, 1), _multiplies(0, 1)),
    "FusedConv": Kind(_convolution(1), _never),
    "FusedMatMul": Kind(_product(0, 1), _never),
    "FusedGemm": Kind(_product(0, 1), _never),
    "Attention": Kind(_standard_or_packed, _never),
    "MultiHeadAttention": Kind(_attention(past=6), _never),
    "GroupQueryAttention": Kind(_attention(past=3), _never),
    "LSTM": Kind(_recurrent, _never),
    "GRU": Kind(_recurrent, _never),
    "RNN": Kind(_recurrent, _never),
    "QLinearConv": Kind(_convolution(3), _always),
    "ConvInteger": Kind(_convolution(1), _always),
    "QLinearMatMul": Kind(_product(0, 3), _always),
    "MatMulInteger": Kind(_product(0, 1), _always),
    "QGemm": Kind(_product(0, 3), _always),
    "DynamicQuantizeMatMul": Kind(_product(0, 1), _always),
    "MatMulIntegerToFloat": Kind(_product(0, 1), _always),
    "DynamicQuantizeLSTM": Kind(_recurrent, _always),
    "MatMulNBits": Kind(_n_bits, _eight_bit_inputs),
}


def float_layers(found: Coverage, share: float = 0.01) -> list[Product]:
    """The layers that stay float and have at least ``share`` of the multiplications, the largest first."""
    left = [layer for layer in found.layers if not layer.integer and layer.macs >= share * found.macs]
    return sorted(left, key=lambda layer: -layer.macs)
