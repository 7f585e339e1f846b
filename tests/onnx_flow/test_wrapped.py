"""A model in another dress is quantized as well as the model itself: every model of the passes in every dress.

The dresses (``wrapped.py``): in the branch of an If, the bodies of Loop and Scan, functions, twice, with all it makes
returned, constants as inputs and nodes, names that are missing or odd, other opsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models, pass_models
from tests.onnx_flow.judged import answers, configuration, opened, sqnr
from tests.onnx_flow.test_passes import ZOO

from quark.errors import QuarkError
from quark.onnx import ModelQuantizer

pytestmark = pytest.mark.filterwarnings("ignore")
PRESETS = ("A8W8", "A8W8_CPU", "XINT8", "A16W8", "UINT8_DYNAMIC_QUANT", "MATMUL_NBITS")
#: Models that are quantized already.
QUANTIZED = ("a8w8", "bf16", "bfp16", "channels_far_apart", "extended", "out_of_reach", "quantized_clips", "u8s8 cpu")
QUANTIZED += ("unaligned_bias", "xint8")
CASES = [case for case in (*ZOO, *pass_models.TRIGGERS, "random 0", "random 1") if case not in QUANTIZED]
#: dB that a dress may cost. A tensor that two read, or that is returned, has codes where it had none between operators
#: that run as one; a normalization, a Concat or an LSTM's step that is returned in the middle cannot be rewritten.
COST, SHARED = 1.0, 10.0
SHARING = ("twice", "in_two_calls", "all_returned")


@cache
def model_of(case: str) -> onnx.ModelProto:
    if case.startswith("random"):
        return pass_models.random_graph(int(case.split()[1]))
    return ZOO[case] if case in ZOO else pass_models.TRIGGERS[case]()


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
    return [min(sqnr(a, b), 90.0) for a, b in pairs if isinstance(b, np.ndarray) and a.dtype.kind == "f"]
