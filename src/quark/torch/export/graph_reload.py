"""A folder of a model that graph mode quantized becomes a graph again.

The quantizers of activations belong to tensors of the graph, so the graph is made as it was: by the same steps, and by
what the configuration in the folder says. Their scales, and the codes of the weights, are those of the file.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import GraphModule

from quark.errors import ModelError
from quark.numerics.granularity import Channel
from quark.torch.config.model import QConfig
from quark.torch.config.type import QuantizationMode
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.export.config.config import JsonExporterConfig
from quark.torch.export.skeleton import fill, make_ready
from quark.torch.fake_quantize import FakeQuantize
from quark.torch.graph.insert import insert
from quark.torch.graph.place import place
from quark.torch.graph.point import points
from quark.torch.graph.quantize import keep
from quark.torch.graph.trace import float_graph, is_exported
from quark.torch.matching import Match
from quark.torch.plan_rows import on_axis, put, stages_in, tensor_name


def is_of_graph(config: QConfig) -> bool:
    """Whether graph mode quantized the model of a folder."""
    return config.quant_mode is QuantizationMode.fx_graph_mode


def ready_graph(
    model: nn.Module | None, checkpoint: Checkpoint, config: QConfig, stored: JsonExporterConfig
) -> GraphModule:
    """The quantized graph, whose tensors are still to be loaded.

    Args:
        model: the graph of the float model, as ``torch.export`` makes it; comes back unchanged.
        checkpoint: the folder.
        config, stored: what it says.

    Raises:
        ModelError: another model, or none.
        ConfigError: the configuration does not fit the graph.
    """
    if model is None or not is_exported(model):
        other = "" if model is None else f", not of {type(model).__name__}"
        raise ModelError(
            f"{str(checkpoint.folder)!r} was quantized in graph mode, and its scales are those of a graph{other}: "
            "import_model_from_safetensors takes torch.export.export(model.eval(), args).module(), exported as it was "
            "then"
        )
    graph = float_graph(model)
    places = place(graph, config)
    insert(graph, places)
    for item in places.layers.quantized:
        align_bias(item, checkpoint)
        make_ready(Match(item.layer, item.plan), stored.pack_method, stored.weight_format, bytes_only=True)
    for name, point in points(graph):
        for inner, part in point.named_modules(prefix=name):
            if isinstance(part, FakeQuantize) and part.stage.calibrated:
                expect(part, f"{inner}.zero_point" in checkpoint.names)
    return keep(graph, config)


def align_bias(item: Match, checkpoint: Checkpoint) -> None:
    """A bias whose scale is the product of two others has one per channel where the weight has."""
    plan, name, scale = item.plan, tensor_name(item.layer.name, "bias"), f"{item.layer.name}.bias_scale"
    if scale in checkpoint.names and checkpoint.read(scale).ndim:
        stages = tuple(on_axis(stage, Channel(0)) for stage in stages_in(plan, name))
        put(plan, name, "bias", stages, plan.tensors[name].reason)


def expect(part: FakeQuantize, zero_point: bool) -> None:
    """Let the quantizer of an activation take a scale, and a zero point where the file has one."""
    fill(part, None, torch.device("cpu"))
    if zero_point and part.zero_point is None:
        part.zero_point = torch.empty(0, dtype=torch.int32, device="meta")
