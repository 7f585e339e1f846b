"""The language model of one that sees or hears, as a GGUF file holds it."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.consumers import tiny
from tests.torch_flow.export.test_gguf import bpe, read  # noqa: F401
from tests.torch_flow.export.test_gguf_architectures import network
from tests.torch_flow.export.test_reload import layer, quantized
from torch import nn

from quark.errors import ConfigError, ModelError
from quark.torch.export.api import export_gguf
from quark.torch.export.before_work import check_before_work
from quark.torch.export.gguf_table import DECODERS
from quark.torch.export.language_part import UNSCALED, language_part
from quark.torch.quantization.config.config import Int4PerGroupSpec, QConfig

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = (
    "gemma3",
    "gemma4",
    "llava",
    "mistral3",
    "internvl",
    "qwen2_audio",
    "qwen3_vl",
    "glm4v_moe",
    "hunyuan_vl",
    "paddleocr_vl",
)
INT4 = layer(Int4PerGroupSpec(-1, 32, scale_type="float16"))


def answer(model: Any) -> torch.Tensor:
    """Logits of a text."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(5, 25)[None]).logits
    return found


def small(family: str) -> Any:
    """A model."""
    return tiny.tiny_model(family, dict(tiny.model_types())[family])


@pytest.mark.slow
def test_the_language_part_of_every_model_type_answers_as_the_whole() -> None:
    seen = 0
    for name, cls in tiny.model_types():
        try:
            model: Any = tiny.tiny_model(name, cls)
        except (ValueError, AssertionError):
            continue
        part = language_part(model, DECODERS)
        if part is not model:
            found, wanted = answer(part), answer(model)
            assert float((found - wanted).norm()) <= 1e-5 * float(wanted.norm()), name
            seen += 1
    assert seen > 35


@pytest.mark.parametrize("family", FAMILIES)
def test_it_shares_its_layers_and_answers_as_the_whole(family: str) -> None:
    model = small(family)
    part: Any = language_part(model, DECODERS)
    assert part is not model and language_part(part, DECODERS) is part
    assert part.config.model_type in DECODERS
    assert {id(value) for value in part.parameters()} <= {id(value) for value in model.parameters()}
    assert torch.equal(answer(part), answer(model))


@pytest.mark.parametrize("family", UNSCALED)
def test_one_that_answers_otherwise_alone_is_refused(family: str, bpe: Path, tmp_path: Path) -> None:  # noqa: F811
    model = small(family)
    assert language_part(model, DECODERS) is model
    with pytest.raises(ConfigError, match=f"no GGUF file is written for model_type '{family}'"):
        export_gguf(model, tmp_path, family, bpe)


@pytest.mark.parametrize(("family", "name"), [("llava", "llama"), ("qwen3_vl_moe", "qwen3vlmoe"), ("glm4v", "glm4")])
def test_a_file_holds_the_codes_of_the_language_model_and_names_what_is_left(
    family: str, name: str, bpe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture  # noqa: F811
) -> None:  # fmt: skip
    model = small(family)
    kept = re.compile(r"vis|projector|lm_head|\.gate$")
    floats = [
        path
        for path, one in model.named_modules()
        if isinstance(one, nn.Linear | nn.Conv2d | nn.Conv3d) and kept.search(path)
    ]
    model.resize_token_embeddings(300)
    layers = "model.language_model.layers.1.self_attn"
    wrong = {f"{layers}.o_proj": layer(Int4PerGroupSpec(-1, 16))}
    check_before_work(model, QConfig(INT4, exclude=floats), "gguf", "llama.cpp", bpe)
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.o_proj"):
        check_before_work(model, QConfig(INT4, exclude=floats, layer_quant_config=wrong), "gguf", "llama.cpp", bpe)
    model = quantized(model, QConfig(INT4, exclude=floats))
    with caplog.at_level(logging.WARNING):
        export_gguf(model, tmp_path, family, bpe, float_type="F32")
    assert "without model.vis" in caplog.text or "model.vision_tower" in caplog.text
    fields, tensors = read(tmp_path / f"{family}.gguf")
    assert fields["general.architecture"] == name
    found, module = tensors["blk.1.attn_output.weight"], model.get_submodule(f"{layers}.o_proj")
    values = gguf.quants.dequantize(found.data, found.tensor_type)
    np.testing.assert_allclose(values, module.fake_quantized().weight.detach().numpy(), rtol=1e-3)


def test_norms_of_qwen2_vl_have_no_epsilon_there(bpe: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(ModelError, match="rms_norm_eps is 1e-05"):
        export_gguf(small("qwen2_vl"), tmp_path, "qwen2_vl", bpe)


def test_gemma3n_without_its_towers_is_the_language_model(
    bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Its tower of pictures needs a library that is not there."""
    from transformers.models.gemma3n import modeling_gemma3n as code

    text, made = network("gemma3n_text"), code.AutoModel.from_config
    monkeypatch.setattr(
        code.AutoModel,
        "from_config",
        lambda config: made(config) if config.model_type == "gemma3n_text" else torch.nn.Identity(),
    )
    whole = transformers.Gemma3nForConditionalGeneration(
        transformers.Gemma3nConfig(text_config=text.config.to_dict())
    ).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    for model, name in ((text, "gemma3n_text"), (whole, "gemma3n")):
        export_gguf(model, tmp_path, name, bpe, weight_type="F32", float_type="F32")
    one, other = (read(tmp_path / f"{name}.gguf")[1] for name in ("gemma3n_text", "gemma3n"))
    assert one.keys() == other.keys() and all((one[key].data == other[key].data).all() for key in one)
