"""Layers that keep their weight as [inputs, outputs] (``Conv1D`` of transformers) as linear ones of [outputs, inputs],
codes and scales too, for files that know no others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quark.torch.export.stored import StoredTensor
from quark.torch.fake_quantize import FakeQuantize, parts
from quark.torch.layers import LayerKind, become, is_transposed, known_kind, own_parameter
from quark.torch.plan_rows import on_axis
from quark.torch.quantized_layer import QuantLayer, forget_quantized, quantized_class
from quark.torch.stage import Stages


def upright_stages(stages: Stages, kind: LayerKind) -> Stages:
    """The stages of a weight that is turned to [outputs, inputs]."""
    return tuple(on_axis(stage, kind.weight_granularity(stage.spec.granularity)) for stage in stages)


def set_upright(model: nn.Module) -> None:
    """Turn the weights of a model, which is changed; its tensors stay as they are."""
    for layer in model.modules():
        if is_transposed(layer):
            turn_layer(layer, known_kind(layer))


@torch.no_grad()
def turn_layer(layer: Any, kind: LayerKind) -> None:
    """One layer."""
    weight = own_parameter(layer).detach()
    if isinstance(layer, QuantLayer):
        stored = layer._modules["weight_quantizer"]
        if isinstance(stored, StoredTensor):  # of a file: values on its grid
            layer._modules["weight_quantizer"] = stored.quantizer(weight)
            weight, layer.frozen = stored(weight), True
        for part in parts(layer._modules["weight_quantizer"] or nn.Module()):
            turn_part(part, kind)
        forget_quantized([layer])
    layer._parameters["weight"] = nn.Parameter(weight.T, requires_grad=False)
    layer.out_features, layer.in_features = weight.T.shape
    become(layer, quantized_class(nn.Linear) if isinstance(layer, QuantLayer) else nn.Linear)


def turn_part(part: FakeQuantize, kind: LayerKind) -> None:
    """A stage, and its parameters where they are a grid."""
    (part.stage,) = upright_stages((part.stage,), kind)
    for name, value in part._buffers.items():
        part._buffers[name] = value.T if value is not None and value.dim() == 2 else value
