"""Real networks with real data: SqueezeNet on flowers, a 5M-parameter Llama on Shakespeare."""

from __future__ import annotations

from itertools import islice
from types import ModuleType
from typing import Any

import pytest
import torch

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    FP8E4M3PerChannelSpec,
    FP8E4M3PerTensorSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
    Uint4PerGroupSpec,
)

pytestmark = pytest.mark.slow
IMAGES, WINDOWS = 100, 12


@pytest.fixture(scope="module")
def flowers(examples: ModuleType) -> tuple[list[torch.Tensor], list[int], list[torch.Tensor]]:
    """Test images with labels, and images to calibrate on."""
    pairs = [
        (torch.from_numpy(examples.caffe_input(image)), label)
        for image, label in list(examples.flower_images("test"))[:: 800 // IMAGES]
    ]
    calibration = [torch.from_numpy(feed["data"]) for feed in islice(examples.calib_flowers5(), 16)]
    return [image for image, _ in pairs], [label for _, label in pairs], calibration


def classes(model: torch.nn.Module, images: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(torch.cat(images[k : k + 20])).argmax(1) for k in range(0, len(images), 20)])


CHANNEL = Int8PerChannelSpec(ch_axis=0, symmetric=True).to_quantization_spec()
VISION: dict[str, QLayerConfig] = {
    "static": QLayerConfig(input_tensors=Int8PerTensorSpec().to_quantization_spec(), weight=CHANNEL),
    "dynamic": QLayerConfig(input_tensors=Int8PerTensorSpec(is_dynamic=True).to_quantization_spec(), weight=CHANNEL),
    "weight-only": QLayerConfig(weight=CHANNEL),
}


@pytest.mark.parametrize("strategy", VISION)
def test_int8_squeezenet_keeps_its_accuracy(strategy: str, examples: ModuleType, flowers: Any) -> None:
    images, labels, calibration = flowers
    model = examples.torch_flowers5()
    before = classes(model, images)
    float_top1 = (before == torch.tensor(labels)).float().mean().item()
    ModelQuantizer(QConfig(VISION[strategy])).quantize_model(model, calibration)
    after = classes(model, images)
    assert float_top1 > 0.8
    assert (after == torch.tensor(labels)).float().mean().item() > float_top1 - 0.02
    assert (after == before).float().mean().item() > 0.96


LANGUAGE: dict[str, tuple[QLayerConfig, float]] = {  # and how much larger the perplexity may be
    "int8 per channel and token": (
        QLayerConfig(Int8PerChannelSpec(1, True, is_dynamic=True).to_quantization_spec(), None, CHANNEL),
        1.005,
    ),
    "fp8 static": (
        QLayerConfig(
            FP8E4M3PerTensorSpec().to_quantization_spec(), None, FP8E4M3PerTensorSpec().to_quantization_spec()
        ),
        1.01,
    ),
    "fp8 per channel and token": (
        QLayerConfig(
            FP8E4M3PerChannelSpec(1, is_dynamic=True).to_quantization_spec(),
            None,
            FP8E4M3PerChannelSpec(0).to_quantization_spec(),
        ),
        1.01,
    ),
    "int4 groups of 32": (QLayerConfig(weight=Int4PerGroupSpec(-1, 32).to_quantization_spec()), 1.02),
    "uint4 groups of 32": (QLayerConfig(weight=Uint4PerGroupSpec(-1, 32).to_quantization_spec()), 1.02),
    "mxfp4": (
        QLayerConfig(OCP_MXFP4Spec(-1).to_quantization_spec(), None, OCP_MXFP4Spec(-1).to_quantization_spec()),
        1.1,
    ),
}


@pytest.fixture(scope="module")
def llama(examples: ModuleType) -> tuple[Any, torch.Tensor, torch.Tensor, float]:
    """The model, ids to calibrate on, ids to measure with, the float perplexity."""
    pytest.importorskip("transformers")
    model, tokenizer = examples.torch_shakespeare()
    train, test = (torch.tensor(examples.shakespeare_ids(tokenizer, part)) for part in ("train", "test"))
    return model, train, test, perplexity(model, test)


def perplexity(model: torch.nn.Module, ids: torch.Tensor) -> float:
    losses = []
    with torch.no_grad():
        for k in range(0, 256 * WINDOWS, 256):
            part = ids[k : k + 257]
            losses.append(torch.nn.functional.cross_entropy(model(part[None, :-1]).logits[0], part[1:]))
    return float(torch.stack(losses).mean().exp())


@pytest.mark.parametrize("scheme", LANGUAGE)
def test_a_llama_keeps_its_perplexity(scheme: str, examples: ModuleType, llama: Any) -> None:
    _, train, test, before = llama
    layer, factor = LANGUAGE[scheme]
    model, _ = examples.torch_shakespeare()
    samples = [{"input_ids": train[None, k : k + 256]} for k in range(0, 1024, 256)]
    ModelQuantizer(QConfig(layer, exclude=["lm_head"])).quantize_model(model, samples)
    after = perplexity(model, test)
    assert 25 < before < 33
    assert before * 0.99 < after < before * factor
    ModelQuantizer.freeze(model)
    assert perplexity(model, test) == pytest.approx(after, rel=1e-6)


def test_generation_token_by_token_is_what_one_pass_computes(examples: ModuleType, llama: Any) -> None:
    """With a scale per token, a token's result does not depend on what else is in the call."""
    _, _, test, _ = llama
    model, _ = examples.torch_shakespeare()
    layer = QLayerConfig(Int8PerChannelSpec(1, True, is_dynamic=True).to_quantization_spec(), None, CHANNEL)
    ModelQuantizer(QConfig(layer, exclude=["lm_head"])).quantize_model(model)
    text = model.generate(test[None, :32], max_new_tokens=50, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        expected = model(text).logits[0, 31:-1].argmax(-1)
    assert text.shape[1] > 40
    assert (text[0, 32:] == expected).float().mean().item() > 0.95
