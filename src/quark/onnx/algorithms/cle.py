"""Cross-layer equalization in a graph: find the pairs and triples of layers, hand their channels to the mathematics.

A chain is Conv, ConvTranspose or Gemm, then operators that scale with their input and keep channels apart, then such a
layer again, every tensor between read once. The pairs are equalized in graph order. A depthwise convolution between two
other layers is equalized as a triple as well, after its first pair. The first pair, whose tail has changed since, comes
once more at the end. The order is that of AMD Quark, so that power-of-two positions come out alike.

Not handled: MatMul, grouped convolutions that are not depthwise, tensors with several readers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from quark.algorithms.cle import magnitudes, pair_scales, triple_scales
from quark.ir.surgery import constant_array, input_at, int_attribute, sole_consumer
from quark.onnx.algorithms.channels import LAYERS, ChannelLayer, layer_of
from quark.onnx.graph.report import PassReport
from quark.onnx.passes import clip6_to_relu
from quark.onnx.qdq.slots import pads_with_zero
from quark.onnx.quantization.config.algorithm import CLEConfig

#: Steps without progress after which ``cle_steps=-1`` gives up.
STAGNANT_STEPS = 20
_STAGNANT = 1e-9


def run(
    model: ir.Model,
    config: CLEConfig,
    replace_clip6: bool = False,
    takes_part: Callable[[ir.Node], bool] | None = None,
    part: float = 1.0,
) -> PassReport:
    """Equalize every chain of the main graph, in place.

    Args:
        takes_part: layers that may be changed; all where it is None.
        replace_clip6: first turn Clip(0, 6) between two layers into Relu (the option ``ReplaceClip6Relu``), which is
            another function.
        part: how far every step goes, from 0 (nothing) to 1 (until both sides are equal).
    """
    if replace_clip6:
        clip6_to_relu.run(model, _between_layers)
    found = find_chains(model)
    chains = [chain for chain in found if takes_part is None or all(takes_part(layer.node) for layer in chain)]
    if config.cle_steps < 0 and chains:
        _until_it_stops(chains, config, part)
    for _ in range(config.cle_steps):
        for chain in chains:
            equalize(chain, config, part)
    return PassReport("cle", len(chains))


def _until_it_stops(chains: list[tuple[ChannelLayer, ...]], config: CLEConfig, part: float) -> None:
    """Equalize all chains until their weights hardly change, or change no less than before."""
    stagnant, last = 0, np.inf
    while stagnant < STAGNANT_STEPS and last > config.cle_total_layer_diff_threshold:
        change = sum(_changed(chain, config, part) for chain in chains)
        stagnant = stagnant + 1 if abs(last - change) < _STAGNANT else 0
        last = change


def _changed(chain: tuple[ChannelLayer, ...], config: CLEConfig, part: float) -> float:
    """Equalize a chain; the sum of mean changes of its weights."""
    before = [layer.weight for layer in chain]
    equalize(chain, config, part)
    return sum(
        float(np.abs(layer.weight.astype(np.float64) - old).mean()) for layer, old in zip(chain, before, strict=True)
    )


def find_chains(model: ir.Model) -> Iterator[tuple[ChannelLayer, ...]]:
    """Pairs in graph order; a triple comes after the pair that ends in its depthwise layer."""
    first: tuple[ChannelLayer, ...] = ()
    for node in model.graph:
        head = layer_of(node)
        middle = None if head is None else layer_of(_next_layer(node))
        if head is None or middle is None or not _fits(head, middle):
            continue
        first = first or (head, middle)
        yield head, middle
        tail = layer_of(_next_layer(middle.node)) if middle.depthwise and not head.depthwise else None
        if tail is not None and not tail.depthwise and _is_plain(node) and _is_plain(middle.node):
            yield head, middle, tail
    if first:
        yield first


def _is_plain(node: ir.Node) -> bool:
    """Whether nothing or only a Relu stands between a layer and the next."""
    reader = sole_consumer(node.outputs[0])
    after = reader if reader is None or reader.op_type != "Relu" else sole_consumer(reader.outputs[0])
    return after is not None and after.op_type in LAYERS


def _fits(head: ChannelLayer, tail: ChannelLayer) -> bool:
    return head.shape[head.made] == tail.shape[tail.read]


def _next_layer(node: ir.Node) -> ir.Node | None:
    """The layer that alone reads this one's result, through operators that scale with their input."""
    while True:
        reader = sole_consumer(node.outputs[0])
        if reader is None or reader.inputs[0] is not node.outputs[0]:
            return None
        if reader.op_type in LAYERS:
            return reader
        if not is_homogeneous(reader):
            return None
        node = reader


def is_homogeneous(node: ir.Node) -> bool:
    """Whether f(s·x) = s·f(x) for positive s per channel, and channels stay apart on axis 1."""
    if node.op_type in ("Relu", "LeakyRelu", "PRelu"):
        return True
    if node.op_type == "Pad":
        return pads_with_zero(node) and _keeps_channels(node)
    return node.op_type == "ReduceMean" and bool(int_attribute(node, "keepdims", 1)) and _is_spatial(node)


def _keeps_channels(node: ir.Node) -> bool:
    """Whether a Pad leaves batch and channels as they are."""
    pads = constant_array(input_at(node, 1))
    if pads is None or input_at(node, 3) is not None:
        return False
    begin, end = pads.reshape(2, -1)
    return not (begin[:2].any() or end[:2].any())


def _is_spatial(node: ir.Node) -> bool:
    axes = node.attributes.get("axes")
    array = np.asarray(axes.value) if axes is not None else constant_array(input_at(node, 1))
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    if array is None or shape is None:
        return False
    return bool(((array.reshape(-1) % len(shape)) >= 2).all()) and array.size > 0


def equalize(chain: tuple[ChannelLayer, ...], config: CLEConfig, part: float = 1.0) -> None:
    """Scale one chain."""
    for layer in chain:
        layer.read_in()
    if len(chain) == 2:
        head, tail = chain
        threshold = config.cle_weight_threshold if config.cle_scale_use_threshold else 0.0
        s = pair_scales(_made(head, config), magnitudes(tail.weight, axis=tail.read), threshold, part)
        head.scale_made(s)
        tail.scale_read(1 / s)
    else:
        head, middle, tail = chain
        made = [magnitudes(layer.weight, axis=layer.made) for layer in (head, middle)]
        first, second = triple_scales(made[0], made[1], magnitudes(tail.weight, axis=tail.read), part)
        head.scale_made(first)
        middle.scale_made(second)  # of weight and bias; what it reads grew by the first scale
        middle.scale_weight(1 / first)
        tail.scale_read(1 / second)


def _made(layer: ChannelLayer, config: CLEConfig) -> np.ndarray:
    return magnitudes(layer.weight, layer.bias if config.cle_scale_append_bias else None, layer.made)


def _between_layers(node: ir.Node) -> bool:
    """Whether scales could move through a Clip, were it a Relu."""
    before = node.inputs[0]
    producer = None if before is None else before.producer()
    while producer is not None and is_homogeneous(producer):
        value = producer.inputs[0]
        producer = None if value is None else value.producer()
    return producer is not None and producer.op_type in LAYERS and _next_layer(node) is not None
