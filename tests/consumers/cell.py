"""One cell of the table: an architecture in a scheme and a format, loaded by the program that the format is for.

right      every tensor and the logits are those that were evaluated
import     refused for transformers, which cannot read it; what is written for vLLM is read right by our own import
refused    an error of ours, in one sentence, before anything was written
silent     the program loaded it without an error, and computes with other weights
differs    the weights are right and the logits are not
crash      anything else
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.errors import QuarkError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.experts import unfuse_experts
from quark.torch.export.api import export_compressed_tensors, export_safetensors
from quark.torch.files.foreign import quantized_model
from quark.torch.quantized_layer import QuantLayer, quantized_layers

LOGITS, TENSORS = 1e-3, 1e-5
LEFT = ("missing_keys", "unexpected_keys", "mismatched_keys")
EXPORTS: dict[str, Callable[[nn.Module, Path], None]] = {
    "quark": lambda model, folder: export_safetensors(model, folder),
    "compressed-tensors": lambda model, folder: export_compressed_tensors(model, folder),
    "awq": lambda model, folder: export_safetensors(model, folder, custom_mode="awq"),
    "fp8": lambda model, folder: export_safetensors(model, folder, custom_mode="fp8"),
}


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """||a - b|| / ||b||, the mean of the last axis removed."""
    a, b = (x.double() - x.double().mean(-1, keepdim=True) for x in (found, wanted))
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def effective(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, weight that is multiplied by) of the layers of a model that are quantized."""
    for name, layer in quantized_layers(model):
        yield name, layer.fake_quantized()._parameters["weight"].detach()  # type: ignore[union-attr]


def quantize(model: nn.Module, scheme: str, inputs: dict[str, torch.Tensor]) -> nn.Module:
    """As ``quark torch quantize`` does."""
    config = LLMTemplate.for_model(model).get_config(scheme)
    return ModelQuantizer(config).quantize_model(model, [inputs])


def load(model: nn.Module, folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """As a user of transformers loads it."""
    cls: Any = type(model)
    return cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)


def check(model: nn.Module, scheme: str, form: str, inputs: dict[str, torch.Tensor], answer: Any) -> dict[str, Any]:
    """One cell; ``model`` is float and stays as it is."""
    stage, before = "quantize", answer(model, inputs)
    model = copy.deepcopy(model)
    try:
        quantize(model, scheme, inputs)
        wanted = answer(model, inputs)
        with tempfile.TemporaryDirectory() as folder:
            stage = "export"
            EXPORTS[form](model, Path(folder) / "model")
            stage = "load"
            loaded, told = load(model, Path(folder) / "model")
            stage = "run"
            found = answer(loaded, inputs)
            return judged(model, loaded, told, found, wanted, before)
    except QuarkError as error:
        kind = "refused" if stage in ("quantize", "export") else "crash"
        found = {"cell": kind, "stage": stage, "why": str(error)[:400]}
        if form == "compressed-tensors" and "transformers does not read" in found["why"]:
            return imported(model, inputs, answer, before, found)
        return found
    except Exception as error:
        return {"cell": "crash", "stage": stage, "why": f"{type(error).__name__}: {str(error)[:400]}"}


def imported(
    model: nn.Module, inputs: dict[str, torch.Tensor], answer: Any, before: torch.Tensor, refused: dict[str, Any]
) -> dict[str, Any]:
    """A refused cell, or what our own import reads where it is written for vLLM."""
    wanted = answer(model, inputs)
    try:
        with tempfile.TemporaryDirectory() as folder:
            export_compressed_tensors(model, Path(folder) / "model", program="vllm")
            loaded = quantized_model(Path(folder) / "model")
            read = judged(model, loaded, {}, answer(loaded, inputs), wanted, before)
    except (QuarkError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        return {**refused, "import": f"{type(error).__name__}: {str(error)[:200]}"}
    return {**refused, "cell": "import"} if read["cell"] == "right" else {**refused, "cell": read["cell"], **read}


def judged(
    model: nn.Module, loaded: nn.Module, told: dict[str, Any], found: torch.Tensor, wanted: torch.Tensor, before: Any
) -> dict[str, Any]:
    """What a loaded model is worth."""
    unfuse_experts(loaded)
    error, cost = difference(found, wanted), difference(wanted, before)
    worst = max(((apart(value, weight_of(loaded, name)), name)
                 for name, value in effective(model)), default=(0.0, ""))  # fmt: skip
    count = sum(1 for _ in quantized_layers(model))
    made: dict[str, Any] = {"error": error, "cost": cost, "worst": worst, "layers": count}
    left = {kind: sorted(map(str, told[kind]))[:3] for kind in LEFT if told.get(kind)}
    if not error <= LOGITS or not worst[0] <= TENSORS:
        kind = "differs" if worst[0] <= TENSORS and not left else "silent"
        return {"cell": kind, **made, **left}
    return {"cell": "right", **made, **left}


def apart(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Relative distance of two tensors; infinite where one is missing or of another shape."""
    if wanted.shape != found.shape:
        return float("inf")
    return float((wanted - found).double().norm() / wanted.double().norm().clamp(min=1e-30))


def weight_of(model: nn.Module, name: str) -> torch.Tensor:
    """The weight that a loaded model multiplies by; NaN where it has no such layer."""
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        return torch.tensor(float("nan"))
    if isinstance(layer, QuantLayer):
        return layer.fake_quantized()._parameters["weight"].detach()  # type: ignore[union-attr]
    return getattr(layer, "weight", torch.tensor(float("nan"))).detach()
