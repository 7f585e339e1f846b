"""Olive's tests of its pass QuarkQuantization, whose package ``quark`` is this one.

They are marked to be skipped, because AMD's package cannot stand beside onnxruntime-genai; the mark is taken off. Their
module of helpers, ``test.utils``, makes models with programs that the test does not need: of it, the two functions that
these tests call are here.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

HOME = tempfile.TemporaryDirectory()


def get_pytorch_model_dummy_input(model: Any = None, batch_size: int = 1) -> torch.Tensor:
    """Theirs."""
    return torch.randn(batch_size, 1)


def get_onnx_model() -> Any:
    """Their network, a linear layer and a sigmoid, as a file."""
    from olive.model import ONNXModelHandler

    weights = np.random.default_rng(0).normal(size=(10, 1)).astype(np.float32)
    tensors = [numpy_helper.from_array(weights, "fc1.weight"), numpy_helper.from_array(weights[:, 0], "fc1.bias")]
    nodes = [
        helper.make_node("Gemm", ["input", "fc1.weight", "fc1.bias"], ["/fc1/Gemm_output_0"], transB=1),
        helper.make_node("Sigmoid", ["/fc1/Gemm_output_0"], ["output"]),
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, n]) for name, n in (("input", 1), ("output", 10))
    ]
    graph = helper.make_graph(nodes, "dummy", ends[:1], ends[1:], tensors)
    path = Path(HOME.name) / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return ONNXModelHandler(model_path=str(path))


def pytest_configure(config: Any) -> None:
    """Before their modules are imported."""
    package, utils = ModuleType("test"), ModuleType("test.utils")
    utils.get_onnx_model = get_onnx_model  # type: ignore[attr-defined]
    utils.get_pytorch_model_dummy_input = get_pytorch_model_dummy_input  # type: ignore[attr-defined]
    package.__path__ = []
    sys.modules["test"], sys.modules["test.utils"] = package, utils


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take the mark off."""
    for item in items:
        item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "skip"]
