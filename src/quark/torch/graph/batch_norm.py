"""``fold_batch_norm``: batch norms folded into a model's own layers, for quantization in eager mode."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import Node

from quark.errors import ModelError
from quark.torch.calibration import evaluating
from quark.torch.graph.calls import arguments, operator
from quark.torch.graph.fold import FOLDABLE, BatchNorm, fold_into
from quark.torch.graph.lift import LAYERS
from quark.torch.graph.trace import exported_with

log = logging.getLogger(__name__)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def fold_batch_norm(model: nn.Module, sample: Any) -> list[str]:
    """Fold every batch norm that directly follows a layer into it, in place; it becomes ``nn.Identity``.

    What follows what is read from the graph that ``torch.export`` makes; layers and norms that are called several
    times, or whose result is read elsewhere too, stay as they are. Weights become new parameters: make optimizers
    afterwards.

    Args:
        model: a float model. The running statistics are what is folded, also if it is in training mode.
        sample: what the model is called with: a tensor, a mapping, a tuple or a list.

    Returns:
        Names of the layers that changed.

    Raises:
        ModelError: a model that cannot be exported, or is quantized already.
    """
    modules = dict(model.named_modules())
    if any(type(module).__module__.startswith("quark.") for module in modules.values()):
        raise ModelError(f"{type(model).__name__} is quantized already; fold batch norms into the float model")
    with evaluating(model):
        graph: Any = exported_with(model, sample).module().graph
    pairs = list(find_pairs(list(graph.nodes), modules))
    for layer_name, norm_name in pairs:
        layer, norm = modules[layer_name], modules[norm_name]
        mean, var = norm.running_mean, norm.running_var
        fold_into(layer, BatchNorm(norm.weight, norm.bias, mean, var, norm.eps))
        parent, _, child = norm_name.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.Identity())
    log.info("%d batch norms folded", len(pairs))
    return [layer_name for layer_name, _ in pairs]


def find_pairs(nodes: list[Node], modules: dict[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """(layer, batch norm) by name, where the one feeds the other and nothing else."""
    reads = [str(found.target) for node in nodes for found in node.all_input_nodes if found.op == "get_attr"]
    for node in nodes:
        before = node.args[0] if operator(node) == "batch_norm" else None
        if not isinstance(before, Node) or operator(before) not in LAYERS or len(before.users) > 1:
            continue
        weight, mean = arguments(before)["weight"], arguments(node)["running_mean"]
        targets = [str(getattr(found, "target", "")) for found in (weight, mean)]
        layer, norm = (name.rpartition(".")[0] for name in targets)
        if any(reads.count(name) != 1 for name in targets) or not isinstance(modules.get(norm), NORMS):
            continue
        if type(modules.get(layer)) in FOLDABLE and fits(modules[layer], node) and is_plain(modules[layer]):
            yield layer, norm


def fits(layer: nn.Module, norm: Node) -> bool:
    """Whether the channels of the norm are the outputs of the layer."""
    return not isinstance(layer, nn.Linear) or norm.meta["val"].dim() == 2


def is_plain(layer: nn.Module) -> bool:
    """Whether weight and bias are parameters of the layer itself."""
    return layer._parameters.get("weight") is not None and "parametrizations" not in layer._modules
