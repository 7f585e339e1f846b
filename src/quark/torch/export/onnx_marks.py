"""A quantized torch model as an ONNX graph in which every quantizer is one node, ``Mark``, that names it.

While the exporter of torch traces the model, each quantizer's ``forward`` is that node; then
``quark.torch.export.onnx_nodes`` puts the nodes of the format in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.dataclass import dataclass
from quark.torch.fake_quantize import Quantizer
from quark.torch.graph.point import points
from quark.torch.kv_cache import CacheQuantizer
from quark.torch.quantized_layer import OWN, QuantLayer, forget_quantized, quantized_layers
from quark.torch.softmax import SoftmaxQuantizer

DOMAIN = "openquark.mark"


@dataclass(frozen=True)
class Marked:
    """A quantizer that is marked.

    Attributes:
        name: of its tensor: ``fc1.weight``, ``fc1.input``.
        quantizer: of it.
        value: the tensor, where it is a weight or bias.
        frozen: the tensor holds quantized values.
    """

    name: str
    quantizer: Quantizer
    value: torch.Tensor | None = None
    frozen: bool = False


def quantizers_of(model: nn.Module) -> list[Marked]:
    """Every quantizer of a model."""
    found = []
    for name, layer in quantized_layers(model):
        for slot, quantizer in layer.quantizers():
            own = slot if slot in OWN else slot.removesuffix("_tensors")
            value = layer._parameters[slot] if slot in OWN else None
            found.append(Marked(f"{name}.{own}", quantizer, value, layer.frozen))
    found += [Marked(name, point.quantizer) for name, point in points(model)]
    for name, module in model.named_modules():
        if isinstance(module, CacheQuantizer):
            found += [Marked(f"{name}.{role}", part) for role, part in module.quantizers()]
        if isinstance(module, SoftmaxQuantizer):
            found.append(Marked(f"{name}.probabilities", module.probabilities))
    return found


@contextmanager
def marking(model: nn.Module, found: Sequence[Marked]) -> Iterator[None]:
    """Within the block, quantizers mark what they are given; the model is as it was afterwards."""
    layers = [layer for _, layer in quantized_layers(model)]
    frozen = [layer.frozen for layer in layers]
    try:
        for layer in layers:
            forget(layer, False, compact=True)
        for key, marked in enumerate(found):
            marked.quantizer.__dict__["forward"] = partial(marked_value, key)
        yield
    finally:
        for marked in found:
            marked.quantizer.__dict__.pop("forward", None)
        for layer, before in zip(layers, frozen, strict=True):
            forget(layer, before, compact=False)


def marked_value(key: int, x: torch.Tensor) -> torch.Tensor:
    """``x``, marked where it is a real number."""
    if not x.is_floating_point():
        return x
    symbolic: Any = torch.onnx.ops.symbolic
    return symbolic(f"{DOMAIN}::Mark", (x,), attrs={"key": key}, dtype=x.dtype, shape=x.shape, version=1)


def forget(layer: QuantLayer, frozen: bool, compact: bool) -> None:
    """Drop what a layer has kept of its weight; a ``compact`` one asks its quantizer at each call."""
    forget_quantized([layer])
    layer.__dict__["frozen"], layer.__dict__["compact"] = frozen, compact
