"""``quant_mode=fx_graph_mode``: from a model to the graph of its quantized form.

export → functional → layers → batch norms folded → placed → weights → activations (samples) → biases
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.fx import GraphModule

from quark.config.plan import Plan
from quark.errors import DataError
from quark.torch.calibration import calibrate
from quark.torch.config.model import QConfig
from quark.torch.fake_quantize import parts
from quark.torch.graph.insert import align_biases, insert
from quark.torch.graph.place import UNKNOWN, check_config, place
from quark.torch.graph.point import points
from quark.torch.graph.trace import first_of, float_graph
from quark.torch.layouts import tell_layouts
from quark.torch.prepare import prepare

log = logging.getLogger(__name__)
KEPT = "_user_preserved_attributes"  # what torch.fx gives a copy of a graph beside its modules


def quantize_graph(
    model: nn.Module, config: QConfig, dataloader: Iterable[Any] | None
) -> tuple[GraphModule, Plan, list[str]]:
    """The quantized graph of a float model, which is not changed, every decision, and tensors that no sample reached.

    Raises:
        ConfigError, ModelError, DataError: as for ``ModelQuantizer.quantize_model``.
    """
    check_config(config)
    sample, samples = first_of(dataloader)
    graph = float_graph(model, sample)
    places = place(graph, config)
    insert(graph, places)
    prepare(places.layers)
    static = [name for name, point in points(graph) if any(part.stage.calibrated for part in parts(point))]
    if static and samples is None:
        raise DataError(
            f"static activations need samples, and dataloader is None: give one, or use is_dynamic=True (first of "
            f"{len(static)} tensors: {static[0]!r})"
        )
    unreached = calibrate(graph, samples) if static else []
    align_biases(graph)
    graph.train(model.training)
    if floats := [row.name for row in places.layers.plan.nodes.values() if row.reason == UNKNOWN]:
        log.info("%d operators of no known kind stay float: %s", len(floats), ", ".join(floats))
    tell_layouts(places.layers)
    log.info("%d layers and %d activations quantized", len(places.layers.quantized), len(list(points(graph))))
    return graph, places.layers.plan, unreached


def keep(graph: GraphModule, config: QConfig) -> GraphModule:
    """Mark a graph as quantized; copies of it too."""
    kept: dict[str, Any] = {"quant_config": config, "quark_quantized": True}
    graph.meta.setdefault(KEPT, {}).update(kept)
    for name, value in kept.items():
        setattr(graph, name, value)
    return graph
