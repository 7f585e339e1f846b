"""Calls of convolutions, linear layers and embeddings become modules with the names they had: layers are layers again.

A weight that is computed from parameters alone (standardized, masked) is computed once, and trains as it is then.
One that depends on inputs leaves the call as it is: it multiplies two activations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from quark.torch.graph.calls import arguments, operator, path_of, tensor_of
from quark.torch.graph.fixed import FixedTensors

Arguments = dict[str, Any]
SETTINGS = ("stride", "padding", "dilation", "groups")


def convolution(cls: type[nn.Module], found: Arguments, weight: torch.Tensor, bias: bool) -> nn.Module:
    """A convolution of ``cls``; its weight is set by the caller."""
    settings = {name: as_tuple(found[name]) for name in SETTINGS}
    groups = settings["groups"]
    sizes = (weight.shape[1] * groups, weight.shape[0], tuple(weight.shape[2:]))
    return cls(*sizes, **settings, bias=bias, device="meta")


def transposed(cls: type[nn.Module], found: Arguments, weight: torch.Tensor, bias: bool) -> nn.Module:
    """A transposed convolution, whose weight is [in, out / groups, ...]."""
    settings = {name: as_tuple(found[name]) for name in (*SETTINGS, "output_padding")}
    sizes = (weight.shape[0], weight.shape[1] * settings["groups"], tuple(weight.shape[2:]))
    return cls(*sizes, **settings, bias=bias, device="meta")


def linear(cls: type[nn.Module], found: Arguments, weight: torch.Tensor, bias: bool) -> nn.Module:
    """A linear layer."""
    return cls(weight.shape[1], weight.shape[0], bias=bias, device="meta")


def embedding(cls: type[nn.Module], found: Arguments, weight: torch.Tensor, bias: bool) -> nn.Module:
    """A table of rows; ``torch`` writes -1 for no padding row."""
    padding = found["padding_idx"]
    return cls(
        *weight.shape,
        padding_idx=None if padding == -1 else padding,
        scale_grad_by_freq=found["scale_grad_by_freq"],
        sparse=found["sparse"],
        device="meta",
    )


def as_tuple(value: Any) -> Any:
    """Lists of the graph as the tuples that modules hold."""
    return tuple(value) if isinstance(value, list | tuple) else value


Make = Callable[[type[nn.Module], Arguments, torch.Tensor, bool], nn.Module]
LAYERS: dict[str, tuple[type[nn.Module], Make]] = {
    "conv1d": (nn.Conv1d, convolution),
    "conv2d": (nn.Conv2d, convolution),
    "conv3d": (nn.Conv3d, convolution),
    "conv_transpose2d": (nn.ConvTranspose2d, transposed),
    "linear": (nn.Linear, linear),
    "embedding": (nn.Embedding, embedding),
}


def lift_layers(model: GraphModule, graph: Graph) -> GraphModule:
    """A new module for ``graph`` (changed in place) with layers as modules; every tensor is a copy of ``model``'s."""
    root: dict[str, Any] = {}
    known: dict[str, str] = {}
    fixed = FixedTensors.of(model, graph)
    for node in list(graph.nodes):
        if operator(node) in LAYERS:
            lift(fixed, graph, node, root, known)
    for node in reversed(list(graph.nodes)):
        if not node.users and (node.op == "get_attr" or node in fixed.computed):
            graph.erase_node(node)
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module") and str(node.target) not in root:
            root[str(node.target)] = copied(model, node)
    lifted = GraphModule(root, graph, class_name=type(model).__name__)
    lifted.train(False)
    return lifted


def copied(model: GraphModule, node: Node) -> Any:
    """What ``node`` reads: a copy of a tensor, a module of control flow as it is."""
    value = tensor_of(model, node)
    return copy.deepcopy(model.get_submodule(str(node.target)) if value is None else value)


def lift(fixed: FixedTensors, graph: Graph, node: Node, root: dict[str, Any], known: dict[str, str]) -> None:
    """One call; calls with equal weight, bias and settings share a module."""
    cls, make = LAYERS[operator(node)]
    found = arguments(node)
    weight, bias = fixed.value(found["weight"]), fixed.value(found.get("bias"))
    if weight is None or (found.get("bias") is not None and bias is None):
        return
    source = "indices" if "indices" in found else "input"
    rest = {name: value for name, value in found.items() if name != source}
    key = repr((cls.__name__, rest))
    if key not in known:
        layer = make(cls, found, weight, bias is not None)
        for name, value in (("weight", weight), ("bias", bias)):
            if value is not None:
                trains = value.requires_grad or found[name] in fixed.computed
                kept = nn.Parameter(value.detach().clone(), requires_grad=trains)
                layer._parameters[name] = kept
        stored = found["weight"].op == "get_attr"
        known[key] = free_name(str(found["weight"].target) if stored else path_of(node) or "computed", root)
        root[known[key]] = layer
    with graph.inserting_after(node):
        call = graph.call_module(known[key], (found[source],))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    graph.erase_node(node)


def free_name(target: str, root: dict[str, Any]) -> str:
    """The name of the layer that had the weight called ``target``."""
    name = target.removesuffix(".weight")
    number = 1
    while name in root:
        number += 1
        name = f"{target.removesuffix('.weight')}_{number}"
    return name
