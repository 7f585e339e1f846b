"""Tensors that transformers holds in float32 in models of a half type keep their values on every way to a file."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.consumers import tiny
from tests.pairs import thinned

from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.export.checkpoint import read_checkpoint
from quark.torch.export.write_as import export_as
from quark.torch.files.foreign import convert
from quark.torch.files.quantize import quantize_checkpoint
from quark.torch.files.skeleton import architecture_of, read_skeleton

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
TYPES = dict(tiny.model_types())
KEPT = [  # a rule of transformers' classes, which most of those that have it share
    *("deepseek_v3", "ernie4_5_moe", "solar_open", "gpt_oss", "t5", "qwen3_5_moe_text", "nemotron_h", "hy_v3"),
    *("glm4_moe", "mimo_v2_flash", "afmoe", "llama"),
]


def saved(name: str, folder: Path) -> Any:
    """A small model in float32, whose values no half type holds."""
    model = tiny.tiny_model(name, TYPES[name])
    for value in (*model.parameters(), *model.buffers()):
        if value.is_floating_point():
            value.data = (value.data.float() + 0.01) * (1 + 2**-13)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", thinned([one for one in KEPT if one in TYPES], 4))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_types_are_those_that_transformers_holds(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """With values and without, in the model and read tensor by tensor."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    cls = type(saved(name, tmp_path))
    held = {key: value.dtype for key, value in cls.from_pretrained(tmp_path, dtype=dtype).state_dict().items()}
    checkpoint = read_checkpoint(tmp_path)
    bare = architecture_of(checkpoint, True, False, dtype)
    assert bare is not None
    assert {key: value.dtype for key, value in bare.state_dict().items()} == held
    tensors = read_skeleton(replace(checkpoint, dtype=dtype)).tensors
    known = {key: held[key] for key in tensors if key in held}
    assert known and {key: tensors[key].dtype for key in known} == known


@pytest.mark.parametrize("format", ["quark", pytest.param("compressed-tensors", marks=pytest.mark.slow)])
def test_router_biases_keep_their_values(format: str, tmp_path: Path) -> None:
    """Both ways of quantizing, in another type too, and ``convert`` of each of them, write the biases of the source."""
    model = saved("deepseek_v3", tmp_path / "source")
    given = {key: value for key, value in model.state_dict().items() if key.endswith("e_score_correction_bias")}
    assert given and all(not torch.equal(value, value.bfloat16().float()) for value in given.values())
    loaded = type(model).from_pretrained(tmp_path / "source", dtype=torch.bfloat16)
    config = LLMTemplate.for_model(loaded).get_config("int8_wo_per_channel")
    quantize_checkpoint(tmp_path / "source", tmp_path / "files", config, dtype=torch.bfloat16)
    export_as(ModelQuantizer(config).quantize_model(loaded), tmp_path / "model", format, tmp_path, program="vllm")
    for folder, other in (("files", "compressed-tensors"), ("model", "quark"), ("model", "compressed-tensors")):
        convert(tmp_path / folder, tmp_path / f"{folder} {other}", other, None if other == "quark" else "vllm")
    convert(tmp_path / "files compressed-tensors", tmp_path / "back", "quark")
    for folder in (path for path in tmp_path.iterdir() if path.name != "source"):
        found = load_file(folder / "model.safetensors")
        assert {key: torch.equal(found[key], value) for key, value in given.items()} == dict.fromkeys(given, True)


@pytest.mark.parametrize(
    ("said", "asked", "told"),
    [("float32", None, False), ("bfloat16", None, True), ("bfloat16", torch.bfloat16, False), (None, None, False)],
)
def test_weights_of_another_type_than_the_model_are_told(
    said: str | None, asked: torch.dtype | None, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = saved("llama", tmp_path / "source")
    file = tmp_path / "source" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "dtype": said}))
    config = LLMTemplate.for_model(model).get_config("int8_wo_per_channel")
    quantize_checkpoint(tmp_path / "source", tmp_path / "made", config, dtype=asked)
    assert ("names the type bfloat16" in caplog.text and "the files hold float32" in caplog.text) is told
