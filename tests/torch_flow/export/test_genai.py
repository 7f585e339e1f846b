"""What the configuration of onnxruntime-genai says where a model's own configuration is silent."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quark.errors import ModelError

onnx = pytest.importorskip("onnx")
pytest.importorskip("torch")
from quark.torch.export.before_work import check_before_work  # noqa: E402
from quark.torch.export.genai import CONFIG, LENGTHS, write_config  # noqa: E402
from quark.torch.quantization.config.config import Int8PerTensorSpec, QConfig, QLayerConfig  # noqa: E402

FIELDS = {"vocab_size": 96, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32}


def written(folder: Path, fields: dict[str, Any], generation: dict[str, Any] | None = None) -> dict[str, Any]:
    """The configuration of a model with one layer that has a cache."""
    config = SimpleNamespace(**fields)
    config.get_text_config = lambda: config
    model = SimpleNamespace(config=config, generation_config=generation and SimpleNamespace(**generation))
    names = ("input_ids", "past_key_values.0.key", "past_key_values.0.value")
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in names]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "g", values, [])), folder / "m.onnx")
    write_config(model, folder, folder / "m.onnx")  # type: ignore[arg-type]
    found: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    return found


@pytest.mark.parametrize(
    ("own", "generation", "tokens"),
    [
        ({}, None, (0, 0, 0)),
        ({"bos_token_id": 1, "eos_token_id": 2}, None, (1, 2, 2)),
        ({"eos_token_id": [7, 9]}, None, (0, [7, 9], 7)),
        ({"eos_token_id": 2, "pad_token_id": 5}, None, (0, 2, 5)),
        ({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 5}, {"eos_token_id": 3}, (1, 3, 5)),
        ({"bos_token_id": 1, "eos_token_id": None}, {"bos_token_id": None, "eos_token_id": [4]}, (1, [4], 4)),
    ],
)
def test_tokens_come_from_the_generation_settings_then_the_model_then_are_0(
    own: dict[str, Any], generation: dict[str, Any] | None, tokens: tuple[Any, ...], tmp_path: Path
) -> None:
    model = written(tmp_path, {**FIELDS, **own}, generation)["model"]
    assert (model["bos_token_id"], model["eos_token_id"], model["pad_token_id"]) == tokens


@pytest.mark.parametrize(
    ("own", "heads", "size"),
    [
        ({}, 4, 16),
        ({"num_key_value_heads": 2}, 2, 16),
        ({"head_dim": 24}, 4, 24),
        ({"num_key_value_heads": None, "head_dim": None}, 4, 16),
    ],
)
def test_heads_that_are_not_said_are_those_of_plain_attention(
    own: dict[str, Any], heads: int, size: int, tmp_path: Path
) -> None:
    decoder = written(tmp_path, {**FIELDS, **own})["model"]["decoder"]
    assert (decoder["num_key_value_heads"], decoder["head_size"]) == (heads, size)
    assert decoder["num_hidden_layers"] == 1 and decoder["filename"] == "m.onnx"


def test_the_search_has_what_the_generation_settings_say_and_no_more(tmp_path: Path) -> None:
    fixed = {"max_length": 32, "past_present_share_buffer": False}
    assert written(tmp_path, FIELDS, {"top_k": 0, "temperature": None})["search"] == {"top_k": 0, **fixed}
    assert written(tmp_path, {**FIELDS, "top_p": 0.5})["search"] == {"top_p": 0.5, **fixed}


def test_the_longest_text_is_the_first_that_the_configuration_names(tmp_path: Path) -> None:
    silent = {key: value for key, value in FIELDS.items() if key not in LENGTHS}
    with pytest.raises(ModelError, match=r"longest text.*max_position_embeddings.*n_positions"):
        written(tmp_path, silent)
    for place, name in enumerate(LENGTHS):
        said = dict.fromkeys(LENGTHS[place:], 99) | {name: 7}
        assert written(tmp_path, {**silent, **said})["model"]["context_length"] == 7


EIGHT = QConfig(QLayerConfig(weight=Int8PerTensorSpec("min_max", is_dynamic=False).to_quantization_spec()))
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}


def test_a_model_that_the_program_does_not_run_is_refused_before_any_work(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    )
    check_before_work(llama, EIGHT, "onnx", "onnxruntime-genai", tmp_path)
    llama.config.num_key_value_heads = 4
    with pytest.raises(ModelError, match=r"layer 0 keeps 2 heads of 8 numbers a token.* 4 heads of 8 by config\.json"):
        check_before_work(llama, EIGHT, "onnx", "onnxruntime-genai", tmp_path)
    mixed = transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(
            **SIZES, num_attention_heads=4, num_key_value_heads=2, layer_types=["conv", "full_attention"]
        )
    )
    with pytest.raises(ModelError, match=r"layer 0 of Lfm2ForCausalLM keeps a .*not keys and values"):
        check_before_work(mixed, EIGHT, "onnx", "onnxruntime-genai", tmp_path)


@pytest.mark.parametrize("command", ["quantize", "quantize-files"])
@pytest.mark.parametrize("kind", ["bert", "t5", "qwen2_vl", "bamba", "mamba", "falcon_h1", "nemotron_h"])
def test_what_is_no_decoder_is_refused_in_words_of_the_command_line(
    kind: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``use_cache`` is an argument in Python only; states of convolutions beside keys and values would be lost."""
    pytest.importorskip("transformers")
    from tests.consumers import tiny

    from quark.cli import main

    tiny.made(kind, dict(tiny.model_types())[kind], {}).save_pretrained(tmp_path / "model")
    given = ["torch", command, str(tmp_path / "model"), "-o", str(tmp_path / "out"), "-s", "int8_wo_per_channel"]
    assert main([*given, "--format", "onnx"]) == 1
    error = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert error.startswith("error: --format onnx: ") and "use_cache" not in error and "--format quark" in error
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # no intermediate folder either
