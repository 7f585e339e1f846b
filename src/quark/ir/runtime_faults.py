"""Nodes that keep eleven faults of ONNX Runtime (1.31) and one of OpenVINO away from a model. None changes a value.

Of a Conv, ConvTranspose or Gemm between DequantizeLinear and QuantizeLinear the runtime rounds float weights to int8,
one scale per tensor, and says nothing: a layer that was excluded because its weights do not stand that, or whose
weights have another type, would lose what it was spared. A ``Max`` of one tensor, a copy that the runtime neither
removes nor looks through, before the layer stops it.

Its integer Softmax overflows where it sums one or two entries, and where results are small for their number (an even
attention), and answers 0: an attention over the first token of a text, a model that normalizes over an axis of length
1, or one whose attention looks everywhere, is lost. The copy before it leaves the Softmax in float.

Its integer AveragePool has no dilations (opset 19): the file does not load. Its integer GlobalAveragePool refuses at
every run a result whose scale is 256 times finer than that of what it averages, as behind an InstanceNormalization,
whose means are 0. The same copy leaves both in float.

The runtime carries a DequantizeLinear forward over operators that only move values.

* Where it arrives at a subgraph that reads the result from outside (``If`` and ``Loop``; functions of block formats
  have an ``If`` inside) it writes past the end of a node's inputs, and the process ends. The same copy stops it. Such
  operators inside a branch count too: with fixed sizes the runtime knows which branch is taken, and moves it out.
* From opset 21 on the pair that it puts behind an int8 tensor loses its type on processors where int8 becomes uint8:
  the file does not load. The same pair is written here, so that there is nothing to carry.

It carries a QuantizeLinear back over them, too: a MaxPool behind a float layer works on codes then, for which it has a
fast kernel in the layout of integer convolutions alone, and takes 15 to 80 times as long (112 x 112 of 32 channels: 20
to 1,700 us; a model whose first layer stays float, 0.2 of its speed). A Clip to more than what the codes express stops
it, and is removed afterwards for the same reason. Of a MaxPool that also tells places (for a MaxUnpool), these would
be those of the first of equal codes, not of the largest value: the copy keeps it in float.

A Pad that puts zeros around what a MaxPool of floats reads becomes pads of the MaxPool, which hold nothing: where all
values at an edge are below 0, the answer is the largest of them instead of 0 (Keras's ResNet V2, BiT). The same copy
stops it; sessions of ours do without (``quark.onnx.graph.session``), of float models, too.

A Clip before a QuantizeLinear whose codes reach less than 1.2e-7 beyond it is dropped, as if they said the same: in a
tensor of values as small as that they do not (a Relu6 behind which negative values come back). The same copy, behind
it, keeps it.

A Range of bounds that are vectors of one entry, as in an expanded AffineGrid, runs unless the runtime resolves the
graph again with what it has learned of an If, as it does for models with functions: a Squeeze makes them scalars.

OpenVINO (2026.4) carries a QuantizeLinear back over a Concat, and loses what int8 codes stand for on the way: a layer
behind reads other numbers (SqueezeNet 4 dB for 21). Where the zero point is 0, a second pair of the same scale behind
the first stops it, which ONNX Runtime removes before it looks for anything else. With another zero point the second
pair ends OpenVINO's process (``tests/onnx_flow/test_second_reader.py`` has both graphs), and uint8 codes help.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import (
    Names,
    add_initializer,
    constant_array,
    float_attribute,
    input_at,
    is_constant,
    opset,
    sole_consumer,
)
from quark.ir.walk import all_nodes
from quark.numerics.affine import loses_clip

#: Whose float weights ONNX Runtime rounds, and what it looks through for the QuantizeLinear behind.
ROUNDED, PASSED = frozenset(["Conv", "ConvTranspose", "Gemm"]), frozenset(["Relu", "Clip"])

#: What ONNX Runtime carries a DequantizeLinear over.
MOVERS = frozenset(["MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice"])
#: Functions of these domains may hold an If that reads what they are given.
DOMAINS = ("com.amd.quark", "org.openquark")
#: Entries up to which ONNX Runtime's integer Softmax overflows.
SHORT = 2
#: Its table of exponentials ends at the largest float32 over the number of entries and this, and each is divided by the
#: scale of the result: with a smaller scale than 1 / (entries * HEADROOM) it is infinite. 1 % is left for rounding.
HEADROOM = 0.99 * math.e**5
#: How many times finer than what it averages the result of ONNX Runtime's integer GlobalAveragePool may not be.
FINEST = 256.0
#: The opset from which QuantizeLinear states the type of its result.
TYPED = 21


def work_around_faults(model: ir.Model) -> None:
    """Write what is needed, in place."""
    names = Names(model)
    _make_scalars(model, names)
    _put_copies(model, names)
    _keep_weights(model, names)
    _keep_zeros(model, names)
    _spare_float(model, names)
    _keep_float_pools(model, names)
    _keep_clips(model, names)
    if opset(model) >= TYPED:  # behind the copies, which are float nodes too
        _close_pairs(model, names)
    _repeat_pairs(model, names)


def _repeat_pairs(model: ir.Model, names: Names) -> None:
    """A second pair behind that of a Concat whose codes are int8 around 0."""
    for node in [one for one in model.graph if one.op_type == "Concat" and not one.domain]:
        quantize = sole_consumer(node.outputs[0])
        pair = None if quantize is None or quantize.domain else sole_consumer(quantize.outputs[0])
        if pair is None or pair.op_type != "DequantizeLinear" or pair.domain or not _is_computed_int8(pair.inputs[0]):
            continue
        zero = constant_array(input_at(pair, 2))
        readers = list(pair.outputs[0].uses())
        if (zero is None or not zero.any()) and not any(use.node.op_type == "QuantizeLinear" for use in readers):
            _close(model, pair, pair, readers, names)


def _make_scalars(model: ir.Model, names: Names) -> None:
    """Bounds of a Range that are known to be vectors become scalars."""
    for node in [one for one in all_nodes(model) if one.op_type == "Range" and not one.domain]:
        for number, value in enumerate(node.inputs):
            if value is not None and value.shape is not None and len(value.shape) and node.graph is not None:
                scalar = ir.Value(name=names.fresh(f"{value.name}_scalar"), shape=ir.Shape([]), type=value.type)
                node.graph.insert_before(node, ir.node("Squeeze", [value], outputs=[scalar], name=str(scalar.name)))
                node.replace_input_with(number, scalar)


def _close_pairs(model: ir.Model, names: Names) -> None:
    """Quantize what movers make of int8 tensors with the parameters of those, where a float node reads it."""
    for node in list(model.graph):
        pair = node.inputs[0].producer() if _is_mover(node) and node.inputs[0] is not None else None
        if pair is None or pair.op_type != "DequantizeLinear" or pair.domain or not _is_computed_int8(pair.inputs[0]):
            continue
        value = node.outputs[0]
        readers = [use for use in value.uses() if use.node.op_type != "QuantizeLinear" or use.idx]
        if readers or value.is_graph_output():
            _close(model, node, pair, readers, names)


def _close(model: ir.Model, node: ir.Node, pair: ir.Node, readers: Sequence[Any], names: Names) -> None:
    value = node.outputs[0]
    codes = ir.Value(name=names.fresh(f"{value.name}_codes"), shape=value.shape, type=ir.TensorType(ir.DataType.INT8))
    again = ir.Value(name=names.fresh(f"{value.name}_again"), shape=value.shape, type=value.type)
    quantize = ir.node("QuantizeLinear", [value, *pair.inputs[1:]], outputs=[codes], name=str(codes.name))
    dequantize = ir.node("DequantizeLinear", [codes, *pair.inputs[1:]], outputs=[again], name=str(again.name))
    model.graph.insert_after(node, [quantize, dequantize])
    for use in readers:
        use.node.replace_input_with(use.idx, again)
    if value.is_graph_output():
        value.name, again.name = again.name, value.name
        model.graph.outputs[:] = [again if output is value else output for output in model.graph.outputs]


def _is_mover(node: ir.Node) -> bool:
    return node.op_type in MOVERS and not node.domain


def _is_computed_int8(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == ir.DataType.INT8 and not is_constant(value)


def _put_copies(model: ir.Model, names: Names) -> None:
    for node in list(model.graph):
        if not _carries(node):
            continue
        moved = node.op_type in MOVERS
        inside = [
            use
            for use in node.outputs[0].uses()
            if use.node.domain in DOMAINS or ((moved or _is_mover(use.node)) and _is_below(use.node, model))
        ]
        if inside:
            _copy(model.graph, node, inside, names)


def _copy(graph: ir.Graph, node: ir.Node, uses: Sequence[Any], names: Names) -> None:
    """Let uses of a node's output read a copy of it."""
    value = node.outputs[0]
    name = names.fresh(f"{value.name}_copy")
    copy = ir.Value(name=name, shape=value.shape, type=value.type)
    graph.insert_after(node, ir.node("Max", [value], outputs=[copy], name=name))
    for use in uses:
        use.node.replace_input_with(use.idx, copy)


def _keep_weights(model: ir.Model, names: Names) -> None:
    """A copy before layers with float weights, where ONNX Runtime would round those."""
    for node in list(model.graph):
        if _carries(node):
            uses = [use for use in node.outputs[0].uses() if not use.idx and _is_rounded(use.node)]
            if uses:
                _copy(model.graph, node, uses, names)


def _keep_zeros(model: ir.Model, names: Names) -> None:
    """A copy between a Pad and a MaxPool."""
    while (pool := loses_zeros(model)) is not None:
        pad = cast(ir.Node, cast(ir.Value, pool.inputs[0]).producer())
        _copy(model.graph, pad, [use for use in pad.outputs[0].uses() if use.node.op_type == "MaxPool"], names)


def loses_zeros(model: ir.Model) -> ir.Node | None:
    """A MaxPool behind a Pad of what may be below 0, if there is one."""
    for node in model.graph:
        pad = node.inputs[0].producer() if node.op_type == "MaxPool" and node.inputs[0] is not None else None
        filler = None if pad is None or pad.op_type != "Pad" else input_at(pad, 2)
        if pad is None or pad.op_type != "Pad" or is_not_negative(pad.inputs[0]):
            continue
        if not np.any(float_attribute(pad, "value", 0.0) if filler is None else constant_array(filler)):
            return node
    return None


def is_not_negative(value: ir.Value | None) -> bool:
    """Whether a tensor is made by a function that answers nothing below 0."""
    maker = None if value is None else value.producer()
    if maker is None or maker.domain:
        return False
    low = constant_array(input_at(maker, 1)) if maker.op_type == "Clip" else None
    return maker.op_type in ("Relu", "Sigmoid", "HardSigmoid") or (low is not None and bool((low >= 0).all()))


def _spare_float(model: ir.Model, names: Names) -> None:
    """A copy before a Softmax or a pooling for which ONNX Runtime has no integer kernel that answers right."""
    for node in list(model.graph):
        if _carries(node):
            readers = node.outputs[0].uses()
            uses = [
                use
                for use in readers
                if _overflows(use.node, opset(model)) or _is_dilated(use.node) or _is_much_finer(use.node, node)
            ]
            if uses:
                _copy(model.graph, node, uses, names)


def _is_dilated(node: ir.Node) -> bool:
    """Whether an AveragePool between Q and DQ leaves out entries."""
    if node.op_type != "AveragePool" or node.domain or "dilations" not in node.attributes:
        return False
    return any(step != 1 for step in node.attributes["dilations"].as_ints()) and _is_quantized(node)


def _is_much_finer(node: ir.Node, source: ir.Node) -> bool:
    """Whether a GlobalAveragePool between Q and DQ makes codes of a scale that the runtime refuses; one entry or more
    are averaged."""
    if node.op_type != "GlobalAveragePool" or node.domain:
        return False
    readers, origin = [use.node for use in node.outputs[0].uses()], _origin(source)
    behind = next((reader for reader in readers if reader.op_type == "QuantizeLinear"), None)
    read, made = (None if one is None else constant_array(one.inputs[1]) for one in (origin, behind))
    return read is not None and made is not None and float(read.max()) >= FINEST * float(made.min())


def _overflows(node: ir.Node, version: int) -> bool:
    """Whether a Softmax between Q and DQ sums too few entries for its scale; or may, and has codes of a CPU.

    Signed codes of scales from 1 / 256 on, over an axis of unknown length, are those of devices, whose compilers would
    stumble over a copy.
    """
    if node.op_type != "Softmax" or node.domain or not _is_quantized(node):
        return False
    behind = next(use.node for use in node.outputs[0].uses() if use.node.op_type == "QuantizeLinear")
    zero, step = behind.inputs[2] if len(behind.inputs) > 2 else None, constant_array(behind.inputs[1])
    scale = 0.0 if step is None else float(step.min())
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    may = zero is None or zero.dtype == ir.DataType.UINT8 or scale < 1 / 256
    if shape is None:
        return may
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -1 if version >= 13 else 1
    summed = [shape[axis]] if version >= 13 else list(shape)[axis:]  # older: all axes from there on
    known = [size for size in summed if isinstance(size, int)]
    if len(known) == len(summed):
        return math.prod(known) <= SHORT or scale * math.prod(known) * HEADROOM < 1
    return may


def _keep_float_pools(model: ir.Model, names: Names) -> None:
    """A Clip behind a MaxPool of floats whose result becomes codes of 8 bits for a CPU; a copy where places count."""
    for node in list(model.graph):
        if node.op_type != "MaxPool" or node.domain:
            continue
        behind = sole_consumer(node.outputs[0])
        while behind is not None and _is_mover(behind):
            behind = sole_consumer(behind.outputs[0])
        if behind is None or behind.op_type != "QuantizeLinear":
            continue
        if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
            _copy(model.graph, node, list(node.outputs[0].uses()), names)
            continue
        lowest = None if _carries(node) else lowest_code(behind)
        if lowest is None:
            continue
        value = node.outputs[0]
        name = names.fresh(f"{value.name}_clipped")
        bound = add_initializer(model.graph, np.array(lowest, np.float32), names.fresh(f"{name}_min"))
        clipped = ir.Value(name=name, shape=value.shape, type=value.type)
        uses = list(value.uses())
        model.graph.insert_after(node, ir.node("Clip", [value, bound], outputs=[clipped], name=name))
        for use in uses:
            use.node.replace_input_with(use.idx, clipped)


def _keep_clips(model: ir.Model, names: Names) -> None:
    """A copy behind a Clip that the runtime would drop, though the codes behind it are finer than its bounds."""
    for node in list(model.graph):
        if node.op_type == "Clip" and not node.domain:
            uses = [use for use in node.outputs[0].uses() if not use.idx and _drops(node, use.node)]
            if uses:
                _copy(model.graph, node, uses, names)


def _drops(clip: ir.Node, reader: ir.Node) -> bool:
    """Whether what reads a Clip makes the runtime drop it, and lose by that."""
    if reader.op_type != "QuantizeLinear":
        return False
    low, high = (constant_array(input_at(clip, place)) for place in (1, 2))
    bounds = -math.inf if low is None else float(low.min()), math.inf if high is None else float(high.max())
    return loses_clip(bounds, constant_array(reader.inputs[1]), constant_array(input_at(reader, 2)))


def lowest_code(node: ir.Node) -> float | None:
    """A step less than what a QuantizeLinear to uint8 of one scale can express; None where it is none."""
    if node.op_type != "QuantizeLinear" or node.domain or len(node.inputs) < 3:
        return None
    scale, zero = constant_array(node.inputs[1]), constant_array(node.inputs[2])
    if scale is None or zero is None or scale.size != 1 or scale.dtype != np.float32 or zero.dtype != np.uint8:
        return None
    return -float(scale.reshape(())) * (float(zero.reshape(())) + 1)


def _is_rounded(node: ir.Node) -> bool:
    return node.op_type in ROUNDED and not node.domain and _is_fixed(node.inputs[1]) and _is_quantized(node)


def _is_quantized(node: ir.Node, passed: bool = False) -> bool:
    """Whether a QuantizeLinear stands behind a node, or behind a Relu or Clip behind it."""
    readers = [use.node for use in node.outputs[0].uses()]
    return any(
        reader.op_type == "QuantizeLinear"
        or (reader.op_type in PASSED and not passed and _is_quantized(reader, passed=True))
        for reader in readers
    )


def _is_fixed(value: ir.Value | None) -> bool:
    """Whether a value is a float constant once ONNX Runtime has computed what it can; what is dequantized stays so."""
    node = None if value is None else value.producer()
    if node is None:
        return is_constant(value)
    return node.op_type != "DequantizeLinear" and all(_is_fixed(one) for one in node.inputs if one is not None)


def _is_below(node: ir.Node, model: ir.Model) -> bool:
    """Whether a node stands in a subgraph."""
    return node.graph is not model.graph


def _origin(node: ir.Node) -> ir.Node | None:
    """The DequantizeLinear that a node is, or that a chain of movers leads back to."""
    while _is_mover(node):
        value = input_at(node, 0)
        source = None if value is None else value.producer()
        if source is None:
            return None
        node = source
    return node if node.op_type == "DequantizeLinear" and node.domain in ("", "com.microsoft") else None


def _carries(node: ir.Node) -> bool:
    """Whether a node is a DequantizeLinear, or a chain of movers leads back to one."""
    return _origin(node) is not None
