"""Batch norm folded into the layer before it:  y = g (W x + b - mean) / sqrt(var + eps) + beta, so

    W' = W f,   b' = (b - mean) f + beta   with   f = g / sqrt(var + eps)   per output channel (in float64).

A batch norm is folded where a convolution or linear layer feeds it and nothing else. Not handled: statistics of the
batch (a model in training mode), batch norms before a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import GraphModule, Node

from quark.errors import ModelError
from quark.torch.graph.calls import arguments, operator, tensor_of

FOLDABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.Linear)


class BatchNorm(NamedTuple):
    """The numbers of a batch norm; ``weight`` and ``bias`` may be None."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    mean: torch.Tensor
    var: torch.Tensor
    eps: float

    @property
    def factor(self) -> torch.Tensor:
        """Per channel, float64."""
        scale = (self.var.detach().double() + self.eps).rsqrt()
        return scale if self.weight is None else scale * self.weight.detach().double()


def fold_into(layer: nn.Module, norm: BatchNorm) -> None:
    """Change weight and bias of ``layer`` (new parameters) so that it does what ``norm`` did after it."""
    weight, bias = layer._parameters["weight"], layer._parameters.get("bias")
    if weight is None:
        raise ModelError(f"{type(layer).__name__} has no weight to fold a batch norm into")
    factor = norm.factor
    before = torch.zeros_like(factor) if bias is None else bias.detach().double()
    after = (before - norm.mean.detach().double()) * factor
    after = after if norm.bias is None else after + norm.bias.detach().double()
    grows = weight.requires_grad
    scaled = per_output(layer, weight.detach().double(), factor).to(weight.dtype)
    layer._parameters["weight"] = nn.Parameter(scaled, requires_grad=grows)
    layer._parameters["bias"] = nn.Parameter(after.to(weight.dtype), requires_grad=grows)


def per_output(layer: nn.Module, weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """``weight`` with every output channel multiplied; that of transposed convolutions is [in, out / groups, ...]."""
    rest = (1,) * (weight.dim() - 2)
    if not isinstance(layer, nn.ConvTranspose2d):
        return weight * factor.reshape(-1, 1, *rest)
    split = weight.reshape(layer.groups, -1, *weight.shape[1:])
    return (split * factor.reshape(layer.groups, 1, -1, *rest)).reshape(weight.shape)


def batch_norm(model: GraphModule, node: Node) -> BatchNorm | None:
    """The numbers of a batch-norm node; None where they are not constants.

    Raises:
        ModelError: statistics of the batch.
    """
    found = arguments(node)
    if found["training"]:
        raise ModelError(f"{node.name}: the batch norm uses the statistics of the batch; export model.eval()")
    mean, var = tensor_of(model, found["running_mean"]), tensor_of(model, found["running_var"])
    weight, bias = tensor_of(model, found["weight"]), tensor_of(model, found["bias"])
    if mean is None or var is None:
        return None
    return BatchNorm(weight, bias, mean, var, float(found["eps"]))


def fold_graph(model: GraphModule) -> list[str]:
    """Fold every batch norm of a lifted graph that can be; the names of the layers that changed."""
    modules: Mapping[str, Any] = dict(model.named_modules())
    calls = [str(node.target) for node in model.graph.nodes if node.op == "call_module"]
    folded = []
    for node in list(model.graph.nodes):
        if operator(node) != "batch_norm":
            continue
        norm, before = batch_norm(model, node), node.args[0]
        name = str(before.target) if before.op == "call_module" else ""
        layer = modules.get(name)
        if norm is None or not isinstance(layer, FOLDABLE) or len(before.users) > 1 or calls.count(name) > 1:
            continue
        if isinstance(layer, nn.Linear) and node.meta["val"].dim() != 2:
            continue
        fold_into(layer, norm)
        node.replace_all_uses_with(before)
        model.graph.erase_node(node)
        folded.append(name)
    model.graph.eliminate_dead_code()
    model.recompile()
    model.delete_all_unused_submodules()
    return folded
