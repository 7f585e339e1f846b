"""What the operators of an exported graph are to quantization.

layers        convolutions and linear layers: modules of the graph
COMPUTES      operators that compute on tensors: inputs and output are quantized
ACTIVATIONS   the same; after a layer or an addition that nothing else reads, the two are one: one quantizer, at the end
PASSES        move or select values: what was quantized stays on its grid, so there is no quantizer
JOINS         all inputs and the output share one scale

Other operators stay float: they ask for no quantizer.
"""

from __future__ import annotations

from torch.fx import Node

from quark.torch.graph.calls import arguments, operator

COMPUTES = frozenset((
    "add", "sub", "mul", "div", "neg", "matmul", "bmm", "mean", "sum", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "batch_norm", "instance_norm",
    "layer_norm", "rms_norm", "group_norm", "softmax", "upsample_bilinear2d", "upsample_bicubic2d",
    "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d", "conv_transpose2d", "linear", "einsum",
))  # fmt: skip
ACTIVATIONS = frozenset((
    "relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max", "leaky_relu", "prelu", "elu", "selu",
    "celu", "gelu", "silu", "mish", "hardswish", "hardsigmoid", "sigmoid", "tanh", "softplus",
))  # fmt: skip
PASSES = frozenset((
    "view", "reshape", "flatten", "unflatten", "permute", "transpose", "t", "squeeze", "unsqueeze", "slice",
    "select", "expand", "contiguous", "detach", "alias", "clone", "chunk", "split", "split_with_sizes",
    "getitem", "narrow", "unbind", "movedim", "repeat", "flip", "roll", "index_select", "gather", "max_pool1d",
    "max_pool2d", "max_pool3d", "adaptive_max_pool2d", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
    "upsample_nearest2d", "upsample_nearest1d", "upsample_nearest3d", "amax",
))  # fmt: skip
PRODUCTS = frozenset((
    "matmul", "bmm", "linear", "einsum", "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d",
    "conv_transpose2d",
))  # fmt: skip
JOINS = frozenset(("cat", "stack"))
NORMALIZES = frozenset(("batch_norm", "instance_norm", "layer_norm", "rms_norm", "group_norm"))
BEFORE_ACTIVATION = frozenset(("add", "sub", "batch_norm"))


def passes(node: Node) -> bool:
    """Whether a node only moves values; padding does where it fills up with zero, which is always exact."""
    name = operator(node)
    if name in ("constant_pad_nd", "pad"):
        found = arguments(node)
        return found.get("mode", "constant") != "constant" or not found["value"]
    return name in PASSES


def is_operator(node: Node) -> bool:
    """Whether a node is an operator whose tensors are quantized."""
    return operator(node) in COMPUTES | ACTIVATIONS | JOINS


def is_cheap(node: Node) -> bool:
    """Whether a node is such an operator without a sum of products."""
    return is_operator(node) and operator(node) not in PRODUCTS


def source(node: Node) -> Node:
    """The node that made the values of ``node``."""
    while passes(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def inputs_of(node: Node) -> list[Node]:
    """The tensors that an operator reads, in order; of a normalization what it normalizes.

    Variances and factors per channel have other sizes than values: 8 bits for all of them would make zeros of some.
    """
    found = list(dict.fromkeys(node.all_input_nodes))
    return found[:1] if operator(node) in NORMALIZES else found


def end_of(node: Node, is_layer: bool) -> Node:
    """The last node of the pattern that begins with ``node``: itself, or the activation after it.

    Handled: one activation; and x sigmoid(x), which is SiLU written out.
    """
    if not (is_layer or operator(node) in BEFORE_ACTIVATION):
        return node
    readers = list(node.users)
    if len(readers) == 1 and operator(readers[0]) in ACTIVATIONS and readers[0].args[0] is node:
        return readers[0]
    gates = [reader for reader in readers if operator(reader) in ("sigmoid", "hardsigmoid")]
    products = [reader for reader in readers if operator(reader) == "mul"]
    if len(readers) == 2 and len(gates) == len(products) == 1:
        gate, product = gates[0], products[0]
        if list(gate.users) == [product] and set(product.args[:2]) == {node, gate}:
            return product
    return node


def inside(node: Node, end: Node) -> set[Node]:
    """The nodes of a pattern after its first."""
    return {end, *(reader for reader in node.users if end is not node and reader in (end, *end.all_input_nodes))} - {
        node
    }
