"""Every tenth model type of transformers' registry, exported with free sizes, quantized, and run at three sizes.

A type that has no small model, or that torch's exporter does not write, is skipped with the reason.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tests.onnx_flow.judged import answers, configuration, judged, opened

from quark.onnx import ModelQuantizer
from quark.onnx.coverage import coverage
from quark.onnx.graph.session import RUNTIME_ERRORS

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PRESETS = ("A8W8", "A8W8_CPU", "int8", "wide", "A16W8", "BFP16", "UINT8_DYNAMIC_QUANT", "MATMUL_NBITS")
STEP, INTEGER = 10, 0.95


def tiny() -> ModuleType:
    """The builder of small models, which the tests of consumers have."""
    path = Path(__file__).parents[1] / "consumers" / "tiny.py"
    if "tiny" not in sys.modules:
        spec = importlib.util.spec_from_file_location("tiny", path)
        assert spec is not None and spec.loader is not None
        sys.modules["tiny"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["tiny"])
    return sys.modules["tiny"]


class OneOutput(torch.nn.Module):
    """A model of transformers with its inputs by position, and its logits or first tensor."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names
        self.more = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        found = self.model(**dict(zip(self.names, values, strict=True)), **self.more)
        logits = getattr(found, "logits", None)
        if logits is not None:
            return logits
        return next(value for value in found.values() if isinstance(value, torch.Tensor))


def exported(name: str, cls: str, path: Path) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The ONNX model, its batch and its length free where the exporter can, and a sample."""
    model = tiny().tiny_model(name, cls)
    inputs = tiny().inputs_of(model)
    free = torch.export.Dim.AUTO
    shapes = tuple(dict.fromkeys((0, 1) if "ids" in key else (0,), free) for key in inputs)
    whole, values = OneOutput(model, list(inputs)), tuple(inputs.values())
    with torch.no_grad():
        torch.onnx.export(
            whole, values, path, dynamo=True, input_names=list(inputs), dynamic_shapes=(shapes,), verbose=False
        )
    return onnx.load(path), {key: value.numpy() for key, value in inputs.items()}


def sizes(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The sample, one row more, and half of its length: those that the float model takes."""
    wanted = [
        feed,
        {key: np.concatenate([value, value[:1]]) for key, value in feed.items()},
        {key: value[:, : value.shape[1] // 2] if "ids" in key else value for key, value in feed.items()},
    ]
    session, found = opened(model), []
    for one in wanted:
        with suppress(*RUNTIME_ERRORS):
            answers(session, one)
            found.append(one)
    return found


@pytest.mark.parametrize(("name", "cls"), [*tiny().model_types()][::STEP])
def test_a_model_type_is_quantized_right_at_every_size(name: str, cls: str, tmp_path: Path) -> None:
    try:
        model, feed = exported(name, cls, tmp_path / "float.onnx")
        feeds = sizes(model, feed)
    except Exception as error:
        pytest.skip(f"{type(error).__name__}: {str(error)[:200]}")
    assert feeds
    for preset in PRESETS:
        outcome = judged(model, feeds, preset)
        assert outcome.word == "ok" or "nothing in the model can be quantized" in outcome.why, (preset, outcome)
    made = ModelQuantizer(configuration("A8W8")).quantize_model(model, None, [feed])
    assert made is not None
    assert coverage(made, feed).integer >= INTEGER
