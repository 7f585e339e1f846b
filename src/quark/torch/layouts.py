"""What a layout of scales can be exported to, told when a model is quantized and not when it is written."""

from __future__ import annotations

import logging

from torch import nn

from quark.numerics.granularity import Group
from quark.torch.matching import Matches

log = logging.getLogger(__name__)
OUTPUTS = (0, -2)  # the axis of a matrix [out, in] that a product does not sum along


def across_outputs(found: Matches) -> list[str]:
    """Names of the linear layers whose weights are in groups or blocks of output channels."""
    return [
        item.layer.name
        for item in found.quantized
        if issubclass(item.layer.kind.type, nn.Linear)
        and any(
            isinstance(group := item.written(stage), Group) and group.axis in OUTPUTS for stage in item.stages["weight"]
        )
    ]


def tell_layouts(found: Matches) -> None:
    """Log what the weights can be exported to where that is not everything."""
    names = across_outputs(found)
    if names:
        log.warning(
            "%d linear layers have weights in groups along ch_axis=0, which is over output channels: "
            "export_safetensors with custom_mode='quark' and export_onnx write them; export_gguf, "
            "export_compressed_tensors and custom_mode='awq' do not, because their kernels have scales along the sum, "
            "ch_axis=1 (first: %r)",
            len(names),
            names[0],
        )
