"""Options with a value that could only be ignored are refused, and the message names the nearest value that acts."""

from __future__ import annotations

from typing import Any

import pytest
from tests.onnx_flow import models

from quark.errors import ConfigError
from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, QuantGranularity, XInt8Spec

PER_CHANNEL = QLayerConfig(
    input_tensors=Int8Spec(calibration_method=CalibMethod.MinMax),
    weight=Int8Spec(quant_granularity=QuantGranularity.Channel),
)
POSITIONS = QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec())


def run(layer: QLayerConfig, **options: Any) -> Any:
    proto = models.cnn()
    config = QConfig(layer, extra_options={"PrintSummary": False, **options})
    return ModelQuantizer(config).run(proto, None, [models.feeds(proto)])


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (PER_CHANNEL, {"CopySharedInit": ["Covn"]}, r"CopySharedInit: the operator type 'Covn'.*Did you mean 'Conv'"),
        (PER_CHANNEL, {"CopyBiasInit": ["Gem"]}, r"CopyBiasInit: the operator type 'Gem'.*Did you mean 'Gemm'"),
        (PER_CHANNEL, {"RemoveQDQBetweenOps": [("Conv", "MaxPol")]}, r"RemoveQDQBetweenOps: .*'MaxPol'.*'MaxPool'"),
        (PER_CHANNEL, {"RemoveQDQBetweenOps": ["Conv"]}, r"RemoveQDQBetweenOps.0 cannot be 'Conv'"),
        (PER_CHANNEL, {"SimplifyModelOptions": {"skip_fusion": ["x"]}}, r"'skip_fusion'.*'skip_fusion_patterns'"),
        (
            PER_CHANNEL,
            {"QDQOpTypePerChannelSupportToAxis": {"Conv": 7}},
            r"of Conv '.*' has the axes -4..3, not 7",
        ),
        (POSITIONS, {"Int16Scale": True}, r"Int16Scale replaces float scales.*input_tensors is PowerOf2"),
    ],
)
def test_what_would_be_ignored_is_refused(layer: QLayerConfig, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(layer, **options)


def test_pairs_of_operators_may_be_lists_as_files_have_them() -> None:
    pair = run(PER_CHANNEL, RemoveQDQBetweenOps=[("Relu", "MaxPool")]).plan
    assert run(PER_CHANNEL, RemoveQDQBetweenOps=[["Relu", "MaxPool"]]).plan.tensors.keys() == pair.tensors.keys()
    assert pair.tensors.keys() != run(PER_CHANNEL).plan.tensors.keys()


def test_operator_types_that_only_this_model_lacks_are_no_mistake() -> None:
    assert run(PER_CHANNEL, CopySharedInit=["LSTM"], RemoveQDQBetweenOps=[("Gather", "Softmax")]).proto is not None
