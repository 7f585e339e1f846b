"""For tests written with an older onnx and ONNX Runtime: what they import and no longer find, and an IR version.

The names that onnx has taken away are used by the tests in code that does not run (an evaluator of theirs that is
switched off) or to word a failure: here they may be imported and raise when they are called.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import onnx.helper
import onnx.numpy_helper
from onnxruntime.quantization import matmul_nbits_quantizer

IR_VERSION = 10
#: Module of onnx -> functions that it had.
FUNCTIONS = {onnx.helper: ("float32_to_float8e4m3",), onnx.numpy_helper: ("float8e4m3_to_float32",)}
ELEMENT_TYPES = ("float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz")


def gone(name: str) -> Any:
    """A function that can be imported."""

    def call(*positional: Any, **given: Any) -> Any:
        raise NotImplementedError(f"onnx has no {name} any more")

    return call


def module(name: str, **content: Any) -> None:
    """A module that can be imported, where there is none."""
    try:
        importlib.import_module(name)
    except ImportError:
        made = ModuleType(name)
        vars(made).update(content)
        sys.modules[name] = made
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], last, made)


def pytest_configure(config: Any) -> None:
    """Before their modules are imported."""
    onnx.IR_VERSION = onnx.helper.IR_VERSION = IR_VERSION
    for place, names in FUNCTIONS.items():
        for name in names:
            if not hasattr(place, name):
                setattr(place, name, gone(name))
    module("onnx.reference.custom_element_types", **{name: object() for name in ELEMENT_TYPES})
    for name in ("onnx_array_api", "onnx_array_api.plotting"):
        module(name, __path__=[])
    today = matmul_nbits_quantizer
    names = {name: value for name, value in vars(today).items() if not name.startswith("__")}
    names["MatMul4BitsQuantizer"] = today.MatMulNBitsQuantizer
    module("onnxruntime.quantization.matmul_4bits_quantizer", **names)
    module("onnx_array_api.plotting.text_plot", onnx_simple_text_plot=lambda model: "")
