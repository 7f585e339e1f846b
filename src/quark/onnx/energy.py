"""Types and multiplications of ONNX layers, for the budget that a file of energies names (``quark.search.energy``)."""

from __future__ import annotations

from quark.onnx.coverage import coverage
from quark.onnx.layer_runs import FloatModelFiles
from quark.onnx.quantization.config.candidates import candidate
from quark.onnx.quantization.config.tuners import split
from quark.search.values import FLOAT


def macs_of(common: FloatModelFiles) -> dict[str, float]:
    """Multiplications of every layer for one sample, by name."""
    return {
        layer.name: layer.macs
        for layer in coverage(common.model, common.feed(0), common.job.options.UserCustomOpLibPath).layers
    }


def types_of(name: str) -> str:
    """``inputs/weights`` of a candidate."""
    layer = candidate(split(name)[0])
    if layer is None:
        return f"{FLOAT}/{FLOAT}"
    inputs, weight = (FLOAT if one is None else one.format for one in (layer.inputs, layer.weight))
    return f"{inputs}/{weight}"
