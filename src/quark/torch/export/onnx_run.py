"""An exported graph in a default session of ONNX Runtime: it opens, runs on what the model was traced with, and answers
what the model answers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from quark.errors import ModelError
from quark.reading import reason_of
from quark.report.process import session_threads
from quark.torch.export.onnx_decoder import Traced
from quark.torch.outputs import tensors_of

log = logging.getLogger(__name__)
#: |file - model| / |model| above which the answers are told to differ: 4-bit weights differ by 0.005, since ONNX
#: Runtime rounds their inputs to 8 bits.
APART = 0.02


@torch.no_grad()
def answers_of(traced: Traced) -> list[torch.Tensor]:
    """What the model answers to the arguments that it is traced with."""
    return [tensor.detach().clone() for tensor in tensors_of(traced.model(*traced.arguments, **traced.keywords))]


def run_exported(path: Path, traced: Traced, wanted: list[torch.Tensor]) -> None:
    """Open the file as its user will, with all optimizations, and run it.

    Args:
        path: of the graph, external data beside it.
        traced: what was traced.
        wanted: the model's answers.

    Raises:
        ModelError: ONNX Runtime does not open or run it, or it answers with other sizes, or with no numbers where the
            model has some.
    """
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as errors

    failures = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = session_threads()
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        given = [
            tensor for tensor in tree_leaves((traced.arguments, traced.keywords)) if isinstance(tensor, torch.Tensor)
        ]
        inputs = session.get_inputs()
        if len(inputs) != len(given):  # the graph does not read them all, and says not which
            log.warning("the file was opened and not run: it has %d inputs for %d tensors", len(inputs), len(given))
            return
        found = session.run(None, {one.name: as_array(x) for one, x in zip(inputs, given, strict=True)})
    except errors.NotImplemented as error:
        log.warning("the file was not run: this ONNX Runtime has no kernel for it: %s", reason_of(error))
        return
    except tuple(failures) as error:
        raise ModelError(f"the file is not written: ONNX Runtime does not run it: {reason_of(error)}") from error
    compare([torch.from_numpy(value) for value in tensors_in(found)], wanted)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A feed."""
    return tensor.detach().cpu().contiguous().numpy()


def tensors_in(found: list[Any]) -> list[np.ndarray]:
    """The answers that are floating-point numbers."""
    return [value for value in found if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating)]


def compare(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Tell how far the answers are from the model's.

    Raises:
        ModelError: as ``run_exported``.
    """
    shapes = [[list(tensor.shape) for tensor in tensors] for tensors in (found, wanted)]
    if shapes[0] != shapes[1]:
        raise ModelError(f"the file is not written: it answers {shapes[0]} in ONNX Runtime, and the model {shapes[1]}")
    apart = 0.0
    for x, y in zip(found, wanted, strict=True):
        x, y = x.double(), y.cpu().double()
        if bool((y.isfinite() & ~x.isfinite()).any()):
            raise ModelError("the file is not written: in ONNX Runtime it answers nan or inf where the model does not")
        known = y.isfinite() & x.isfinite()
        apart = max(apart, float((x - y)[known].norm() / y[known].norm().clamp(min=1e-30)) if y.numel() else 0.0)
    if apart > APART:
        log.warning("ONNX Runtime answers %.3g of the output apart from the model: compare them on your data", apart)
