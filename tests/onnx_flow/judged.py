"""What becomes of any model under any preset, in one word: the judge of the sweeps.

ok          it loads in ONNX Runtime with all optimizations and with none, and answers as the float model does
refused     an error of ours, in one sentence
float       the float model does not run on the sample either
crash       an error that is not ours, while quantizing
broken      the result does not load, or does not run where the float model does
shape       an output of another type or shape, or a size stated in the file that is not that of a run
infinite    an output that is not finite where that of the float model is
runtime     with all optimizations ONNX Runtime answers otherwise than with none
far         the answer is far from that of the float model
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime

from quark.errors import QuarkError
from quark.onnx import (
    CalibMethod,
    Config,
    Int8Spec,
    Int16Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    UInt8Spec,
    get_default_config,
)

Feed = Mapping[str, np.ndarray]
#: dB below which an answer is called far from that of the float model
FAR = {"wide": 30.0}
#: values below which an output says nothing
NOTHING = 1e-6
#: 16 bits are nearly lossless, so that a wrong scale, axis or reader cannot hide; of 8 bits the runtime makes kernels
EVERYTHING = {"wide": Int16Spec, "int8": Int8Spec, "uint8": UInt8Spec}


@dataclass(frozen=True)
class Outcome:
    """One word, and why."""

    word: str
    why: str = ""


def everything(make: Any) -> QConfig:
    """Every operator in one integer type."""
    spec = make(calibration_method=CalibMethod.MinMax)
    weight = make(calibration_method=CalibMethod.MinMax, quant_granularity=QuantGranularity.Channel)
    options = {"PrintSummary": False, "QuantizeAllOpTypes": True}
    return QConfig(QLayerConfig(input_tensors=spec, weight=weight), extra_options=options)


def configuration(name: str) -> QConfig | Config:
    """The preset of a name, or 16 bits everywhere."""
    if name in EVERYTHING:
        return everything(EVERYTHING[name])
    config = get_default_config(name)
    config.extra_options.update(PrintSummary=False)
    return Config(config)


def opened(model: onnx.ModelProto, plain: bool = False) -> onnxruntime.InferenceSession:
    """A session as a user opens it, or one without optimizations."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if plain:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def answers(session: onnxruntime.InferenceSession, feed: Feed) -> list[object]:
    """All outputs for a sample."""
    return list(
        session.run(None, {one.name: copy.deepcopy(feed[one.name]) for one in session.get_inputs() if one.name in feed})
    )


def sqnr(wanted: np.ndarray, found: np.ndarray) -> float:
    """Signal over noise in dB, over what is finite in both."""
    a, b = wanted.astype(np.float64).ravel(), found.astype(np.float64).ravel()
    both = np.isfinite(a) & np.isfinite(b)
    error, signal = float(((a - b)[both] ** 2).sum()), float((a[both] ** 2).sum())
    return float("inf") if error == 0 else 10 * float(np.log10(max(signal, 1e-30) / error))


def judged(model: onnx.ModelProto, feeds: Sequence[Feed], preset: str) -> Outcome:
    """Quantize ``model`` with ``feeds``, which may differ in size, and run it on all of them."""
    try:
        original = opened(model)
        wanted = [answers(original, feed) for feed in feeds]
    except Exception as error:
        return Outcome("float", str(error)[:200])
    given = copy.deepcopy(list(feeds))
    try:
        made = ModelQuantizer(configuration(preset)).quantize_model(model, None, list(feeds))
    except QuarkError as error:
        return Outcome("refused", str(error))
    except Exception as error:
        return Outcome("crash", f"{type(error).__name__}: {error}"[:600])
    assert made is not None
    np.testing.assert_equal(list(feeds), given)  # the caller's samples stay as they were
    try:
        onnx.checker.check_model(made) if all(one.domain == "" for one in made.opset_import) else None
        session, plain = opened(made), opened(made, plain=True)
        found = [answers(session, feed) for feed in feeds]
        bare = [answers(plain, feed) for feed in feeds]
    except Exception as error:
        return Outcome("broken", str(error)[:600])
    for expected, ours, unoptimized in zip(wanted, found, bare, strict=True):
        for value, a, b, c in zip(made.graph.output, expected, ours, unoptimized, strict=True):
            said = compared(value.name, a, b, c, preset)
            if said.word != "ok":
                return said
    return Outcome("ok")


def compared(name: str, wanted: object, found: object, plain: object, preset: str) -> Outcome:
    """One output of the float model, and of the quantized one with and without optimizations."""
    if not all(isinstance(one, np.ndarray) for one in (wanted, found, plain)):
        return Outcome("ok" if type(wanted) is type(found) else "shape", name)
    assert isinstance(wanted, np.ndarray) and isinstance(found, np.ndarray) and isinstance(plain, np.ndarray)
    if not wanted.shape == found.shape == plain.shape or wanted.dtype != found.dtype:
        return Outcome("shape", f"{name}: {wanted.dtype}{wanted.shape}, {found.dtype}{found.shape}, {plain.shape}")
    if wanted.dtype.kind != "f" or not wanted.size:
        return Outcome("ok")
    if not np.isfinite(found)[np.isfinite(wanted)].all():
        return Outcome("infinite", name)
    if np.abs(wanted[np.isfinite(wanted)]).max(initial=0) < NOTHING:  # float32's own rounding of what is 0
        return Outcome("ok" if np.abs(found[np.isfinite(wanted)]).max(initial=0) < 1000 * NOTHING else "far", name)
    near = sqnr(wanted, found)
    if near < FAR.get(preset, 3.0):
        return Outcome("far", f"{name}: {near:.1f} dB")
    apart = sqnr(plain, found)
    if apart < near and apart < 20:
        return Outcome("runtime", f"{name}: {apart:.1f} dB apart, {near:.1f} dB from float")
    return Outcome("ok")
