"""Scales that several layers share, because a kernel reads them together.

    shared_scale_groups           siblings (query, key, value): the largest of their tensor scales, for weights
    sync_moe_expert_input_amax    experts: the largest of their input scales, those that no token reached included

For NVFP4 the tensor scale is the one above the scales of the blocks. Only symmetric scales are shared.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quark.torch.fake_quantize import FakeQuantize, parts, quantizer_at
from quark.torch.matching import Matches, weights_in_groups
from quark.torch.plan_rows import tensor_name
from quark.torch.quantized_layer import quantized_layers, static_parts


def share_weight_scales(found: Matches) -> None:
    """Give the weights that are in one group of the plan the largest of their scales."""
    layers = {tensor_name(item.layer.name, "weight"): item.layer.module for item in found.quantized}
    for members in dict.fromkeys(weights_in_groups(found.plan).values()):
        share([part for name in members for part in tensor_parts(layers[name])])


def tensor_parts(layer: nn.Module) -> Iterator[FakeQuantize]:
    """The quantizers of a weight that have one symmetric static scale."""
    quantizer = quantizer_at(layer, "weight_quantizer")
    if quantizer is not None:
        yield from (part for part in parts(quantizer) if has_tensor_scale(part))


def has_tensor_scale(part: FakeQuantize) -> bool:
    """Whether a quantizer has one symmetric static scale."""
    symmetric = part.zero_point is None or not bool(part.zero_point.any())
    return part.scale is not None and part.scale.numel() == 1 and symmetric


def share(members: list[FakeQuantize]) -> None:
    """Give all the largest scale."""
    scales = [part.scale for part in members if part.scale is not None]
    if scales:
        largest = torch.stack([scale.reshape(()) for scale in scales]).amax()
        for part in members:
            part.scale = largest.clone()


def share_expert_inputs(model: nn.Module) -> list[str]:
    """Give the static inputs of the experts of a layer, projection by projection, the largest of their scales.

    Returns:
        Names of the inputs that no sample had reached; they are quantized now.
    """
    adopted = []
    for members in expert_inputs(model).values():
        reached = [part for part in members if part.scale is not None]
        if not reached or not all(has_tensor_scale(part) for part in reached):
            continue
        for part in members:
            if part.scale is None:
                adopted.append(part.tensor_name)
                part.scale, part.zero_point, part.enabled = reached[0].scale, reached[0].zero_point, True
        share(members)
    return adopted


def expert_inputs(model: nn.Module) -> dict[tuple[str, str, int], list[FakeQuantize]]:
    """Static input quantizers by (list of experts, projection, stage)."""
    found: dict[tuple[str, str, int], list[FakeQuantize]] = {}
    for name, layer in quantized_layers(model):
        before, _, rest = name.partition("experts.")
        number, _, projection = rest.partition(".")
        if number.isdigit():
            inputs = [part for slot, part in static_parts(layer) if slot == "input_tensors"]
            for stage, part in enumerate(inputs):
                found.setdefault((before, projection, stage), []).append(part)
    return found
