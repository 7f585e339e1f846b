"""A model in another dress is quantized as well as the model itself: every model of the passes in every dress.

The dresses (``wrapped.py``): in the branch of an If, the bodies of Loop and Scan, functions, twice, with all it makes
returned, constants as inputs and nodes, names that are missing or odd, other opsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models, pass_models
from tests.onnx_flow.judged import answers, configuration, opened, sqnr
from tests.onnx_flow.test_pass_table import model_of
from tests.onnx_flow.test_passes import ZOO
from tests.onnx_flow.wrapped import DRESSES
from tests.pairs import thinned

from quark.errors import QuarkError
from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig
from quark.onnx.graph.model import load, to_proto
from quark.onnx.passes import quant_to_float
from quark.onnx.quantization.config.algorithm import (
    AlgoConfig,
    BiasCorrectionConfig,
    ChannelEqualizationConfig,
    CLEConfig,
    GPTQConfig,
    QronosConfig,
)

pytestmark = pytest.mark.filterwarnings("ignore")
PRESETS = ("A8W8", "A8W8_CPU", "XINT8", "A16W8", "UINT8_DYNAMIC_QUANT", "MATMUL_NBITS")
#: Models that are quantized already.
QUANTIZED = ("a8w8", "bf16", "bfp16", "channels_far_apart", "extended", "out_of_reach", "quantized_clips", "u8s8 cpu")
QUANTIZED += ("bf16 casts", "lstm", "unaligned_bias", "xint8")
CASES = [case for case in (*ZOO, *pass_models.TRIGGERS, "random 0", "random 1") if case not in QUANTIZED]
#: dB that a dress may cost, of at most 40. A tensor that two read, or that is returned, has codes where it had none
#: between operators that run as one; a step of an LSTM that is returned in the middle cannot be rewritten; and an older
#: opset has no LayerNormalization.
ENOUGH, COST, SHARED = 40.0, 3.0, 10.0
SHARING = ("twice", "in_two_calls", "all_returned")
#: A Concat of unlike parts that is returned gives them one scale (AlignConcat): its parts are rounded once.
ALIGNED = ("unlike_parts", "all_returned")


@cache
def plain(case: str, preset: str) -> list[float] | str:
    return quantized(model_of(case), models.feeds(model_of(case)), preset)


def quantized(model: onnx.ModelProto, feed: Mapping[str, np.ndarray], preset: str) -> list[float] | str:
    """dB of every floating output; the error where the model is refused."""
    try:
        made = ModelQuantizer(configuration(preset)).quantize_model(model, None, [dict(feed)])
    except QuarkError as error:
        return str(error)
    assert made is not None
    if all(one.domain == "" for one in made.opset_import):
        onnx.checker.check_model(made, full_check=True)
    expected, found = answers(opened(model), feed), answers(opened(made), feed)
    assert [value.name for value in made.graph.output] == [value.name for value in model.graph.output]
    pairs = [(a, b) for a, b in zip(expected, found, strict=True) if isinstance(a, np.ndarray)]
    assert all(isinstance(b, np.ndarray) and a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    return [min(sqnr(a, b), ENOUGH) for a, b in pairs if isinstance(b, np.ndarray) and a.dtype.kind == "f"]


#: Why a model cannot have a dress: onnx does not convert its operators, or ONNX Runtime runs none of them in functions.
NO_DRESS = ("No Adapter", "no_previous_version", "adapter_lookup", "EmbedLayerNormalization", "not in range", "shape")


def dressed(case: str, dress: str) -> tuple[onnx.ModelProto, Mapping[str, np.ndarray]]:
    try:
        model, feed = DRESSES[dress](model_of(case), models.feeds(model_of(case)))
        onnx.checker.check_model(model)
        answers(opened(model), feed)
    except Exception as error:
        assert any(part in str(error) for part in NO_DRESS), error
        pytest.skip(str(error)[:100])
    return model, feed


def check(case: str, dress: str, presets: tuple[str, ...]) -> None:
    model, feed = dressed(case, dress)
    for preset in presets:
        if (case, dress) == ALIGNED and preset in ("A8W8", "XINT8"):
            continue
        wanted, found = plain(case, preset), quantized(model, feed, preset)
        if isinstance(found, str) or isinstance(wanted, str):  # a body is worth it where it holds layers
            told = found if isinstance(found, str) else wanted
            assert "nothing in the model can be quantized" in told, (preset, wanted, found)
            continue
        lost = max((one - other for one, other in zip(wanted, found[: len(wanted)], strict=True)), default=0.0)
        loose = dress in SHARING or dress.startswith("opset")
        assert lost <= (SHARED if loose else COST), (preset, wanted, found)


@pytest.mark.parametrize("what", thinned(product(CASES, DRESSES), 97), ids=" ".join)
def test_a_dress_costs_nothing(what: tuple[str, str]) -> None:
    check(*what, PRESETS)


#: What was lost, refused or wrong once, each for a class of models: the layout of samples was told by a Transpose that
#: two readers share; a constant that only a body reads was no input any more in IR version 3; a number in a body was
#: taken for one of its name outside; norms of bodies became layers of their own; nodes got names that others had;
#: Transposes of bodies did not move, so that norms between them stayed layers.
ONCE = [
    ("nhwc", "twice", "A8W8"),
    ("constants in a body", "constants_are_inputs", "A8W8"),
    ("two_inputs", "in_a_loop", "UINT8_DYNAMIC_QUANT"),
    ("chain", "in_a_branch", "XINT8"),
    ("slow_forms", "in_two_calls", "A8W8_CPU"),
    ("channels_last", "in_a_branch", "A8W8_CPU"),
]


@pytest.mark.parametrize(("case", "dress", "preset"), ONCE)
def test_what_a_dress_cost_once(case: str, dress: str, preset: str) -> None:
    check(case, dress, (preset,))


@pytest.mark.parametrize("dress", [one for one in DRESSES if not one.startswith("opset") and one != "all_returned"])
def test_what_is_quantized_inside_is_quantized_already(dress: str) -> None:
    model, feed = DRESSES[dress](model_of("a8w8"), models.feeds(model_of("a8w8")))
    said = quantized(model, feed, "A8W8")
    assert isinstance(said, str) and "already quantized: it holds" in said
    assert "convert_quant_to_float" in said
    made, plain = in_float(model), in_float(model_of("a8w8"))
    onnx.checker.check_model(made, full_check=True)
    assert 'op_type: "QuantizeLinear"' not in str(made), "no node of the graph, a body or a function is left"
    found, known = answers(opened(made), feed), answers(opened(plain), models.feeds(model_of("a8w8")))
    for one, other in zip(known, found, strict=False):
        assert sqnr(np.ravel(one), np.ravel(other)) > 100


def in_float(quantized: onnx.ModelProto) -> onnx.ModelProto:
    """What the tool ``convert_quant_to_float`` makes."""
    model = load(quantized)
    quant_to_float.run(model)
    return to_proto(model)


ALGORITHMS = (CLEConfig(), ChannelEqualizationConfig(), BiasCorrectionConfig(), GPTQConfig(), QronosConfig())


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: one.name)
@pytest.mark.parametrize("dress", ["in_a_branch", "in_a_loop"])
def test_algorithms_do_in_bodies_what_they_do_outside(algorithm: AlgoConfig, dress: str) -> None:
    case = "chain" if isinstance(algorithm, (CLEConfig, ChannelEqualizationConfig)) else "cnn"
    feeds = [models.feeds(model_of(case), seed) for seed in range(4)]
    inside = [DRESSES[dress](model_of(case), feed) for feed in feeds]
    spec = Int8Spec(calibration_method=CalibMethod.MinMax)
    found = []
    for model, samples in ((model_of(case), feeds), (inside[0][0], [feed for _, feed in inside])):
        layer = QLayerConfig(input_tensors=spec, weight=spec)
        config = QConfig(layer, algo_config=[algorithm], extra_options={"PrintSummary": False})
        result = ModelQuantizer(config).run(model, None, samples)
        assert result.proto is not None
        fired = max(one.fired for one in result.passes if one.name == algorithm.name)
        both = [(models.run(model, feed), models.run(result.proto, feed)) for feed in samples]
        found.append((fired, sqnr(*(np.concatenate([one[k][0] for one in both]) for k in range(2)))))
    assert found[0][0] > 0 and found[1][0] == found[0][0]
    assert found[1][1] == pytest.approx(found[0][1], abs=0.3)
