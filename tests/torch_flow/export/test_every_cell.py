"""Every scheme in every format of safetensors files, in every float type: written, read back equal, or refused."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.errors import QuarkError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.config.schemes import ROWS
from quark.torch.export import verify
from quark.torch.export.write_as import export_as
from quark.torch.files.foreign import quantized_model
from quark.torch.quantized_layer import quantized_layers

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore")
FORMATS = ("quark", "compressed-tensors", "awq", "gptq", "gptq_v2", "fp8", "modelopt")
SIZES = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
TYPES = [torch.float32, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.bfloat16, torch.float16))]


@pytest.fixture(scope="module")
def plain() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_attention_heads=2)).eval()


def values(model: Any) -> dict[str, torch.Tensor]:
    """The weights that a model multiplies by."""
    return {name: layer.fake_quantized()._parameters["weight"].detach() for name, layer in quantized_layers(model)}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scheme", ROWS)
def test_a_scheme_in_every_format(
    scheme: str, dtype: torch.dtype, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``export`` itself reads back, in windows of rows as of a large model, is not asked again; but our own format
    comes back as a model."""
    monkeypatch.setattr(verify, "WHOLE", 1 << 10)
    model = copy.deepcopy(plain).to(dtype)
    config = LLMTemplate.for_model(model).get_config(scheme)
    model = ModelQuantizer(config).quantize_model(model, [torch.randint(0, 64, (2, 16))])
    written = []
    for format in FORMATS:
        try:
            export_as(model, tmp_path / format, format, tmp_path)
            written.append(format)
        except QuarkError as error:
            assert len(str(error)) > 40 and "\n" not in str(error) and not re.search(r"Traceback|<class", str(error))
            assert not (tmp_path / format).exists()
    assert "quark" in written
    again, wanted = values(quantized_model(tmp_path / "quark")), values(model)
    assert again.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(again[name], wanted[name])] == []
