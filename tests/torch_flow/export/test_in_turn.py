"""gpt_oss in the quark format for vLLM: gate and up of each expert are one tensor whose rows take turns."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.consumers import cell, tiny

from quark.errors import ConfigError
from quark.torch import LLMTemplate, ModelQuantizer, import_model_from_safetensors
from quark.torch.experts import unfuse_experts
from quark.torch.export.api import export_safetensors
from quark.torch.export.before_work import check_before_work
from quark.torch.export.card import Card, write_card
from quark.torch.export.in_turn import is_joined
from quark.torch.export.write_as import config_for
from quark.torch.files.foreign import convert
from quark.torch.files.prequantized import dequantize_checkpoint
from quark.torch.files.quantize import quantize_checkpoint
from quark.torch.quantized_layer import quantized_layers

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
Tensors = dict[str, torch.Tensor]
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
SCHEMES = ("fp8", "ptpc_fp8", "mxfp4", "mxfp4_fp8", "mxfp4_weight_only", "fp8 fp8")
EXPERTS = "model.layers.1.mlp.experts"


def small() -> Any:
    """A float model."""
    return tiny.made("gpt_oss", "GptOssForCausalLM", {}).to(torch.bfloat16)


def planned(model: Any, scheme: str, **more: Any) -> Any:
    """As the command line plans it with ``--for vllm``; behind a space the cache."""
    scheme, _, cache = scheme.partition(" ")
    config = LLMTemplate.for_model(model).get_config(scheme, kv_cache_scheme=cache or None)
    return config_for(dataclasses.replace(config, **more), "quark", "vllm", model.dtype)


def quantized(scheme: str, folder: Path | None = None) -> Any:
    """A quantized one; of a folder where that is given."""
    model = small()
    model = model if folder is None else type(model).from_pretrained(folder)
    return ModelQuantizer(planned(model, scheme)).quantize_model(model, [tiny.inputs_of(model)])


def tensors(folder: Path) -> Tensors:
    """All of a folder."""
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def same(a: Tensors, b: Tensors) -> bool:
    """Names, types and all bits."""
    flat = [
        {name: (one.dtype, one.reshape(-1).view(torch.uint8).tolist()) for name, one in all.items()} for all in (a, b)
    ]
    return flat[0] == flat[1]


def values(found: Tensors, layer: str) -> torch.Tensor:
    """A weight by the rules of AMD's format, [rows, columns]."""
    weight, scale = found[f"{layer}.weight"], found[f"{layer}.weight_scale"]
    if weight.dtype is torch.float8_e4m3fn:
        return (weight.float() * scale.reshape(-1, 1)).to(torch.bfloat16)
    codes = torch.stack((weight & 15, weight >> 4), -1).flatten(-2).long()
    return (FP4[codes] * (2.0 ** (scale.float() - 127)).repeat_interleave(32, -1)).to(torch.bfloat16)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_of_gate_and_up_take_turns_and_come_back(scheme: str, tmp_path: Path) -> None:
    model = quantized(scheme)
    export_safetensors(model, tmp_path / "q", program="vllm")
    found, effective = tensors(tmp_path / "q"), dict(cell.effective(model))
    assert not [name for name in found if ".gate_proj" in name or ".up_proj" in name]
    layers = dict(quantized_layers(model))
    for number in range(4):
        joined = values(found, f"{EXPERTS}.{number}.gate_up_proj")
        for start, own in enumerate(("gate_proj", "up_proj")):
            layer = layers[f"{EXPERTS}.{number}.{own}"]
            assert torch.equal(joined[start::2], effective[f"{EXPERTS}.{number}.{own}"])
            assert torch.equal(found[f"{EXPERTS}.{number}.gate_up_proj.bias"][start::2], layer.bias)
            scale = found.get(f"{EXPERTS}.{number}.gate_up_proj.input_scale")
            quantizer: Any = layer.input_quantizer
            assert scale is None or torch.equal(scale, quantizer.scale)
        down = f"{EXPERTS}.{number}.down_proj"
        assert torch.equal(values(found, down), effective[down])
    assert any("gate_up_proj.input_scale" in name for name in found) == (scheme in ("fp8", "mxfp4_fp8", "fp8 fp8"))

    for given in (None, small()):
        back = dict(cell.effective(import_model_from_safetensors(given, tmp_path / "q")))
        assert back.keys() == effective.keys() and all(torch.equal(back[name], effective[name]) for name in back)
    dequantize_checkpoint(tmp_path / "q", tmp_path / "f", loaded=True)
    floats: Any = type(model).from_pretrained(tmp_path / "f")
    unfuse_experts(floats)
    assert all(torch.equal(floats.get_submodule(name).weight.float(), effective[name].float()) for name in effective)
    with pytest.raises(ConfigError, match=r"gate_up_proj\.\w+', for which transformers has no place"):
        type(model).from_pretrained(tmp_path / "q")


@pytest.mark.parametrize("scheme", ["fp8", "mxfp4_weight_only"])
def test_the_same_files_by_every_way(scheme: str, tmp_path: Path) -> None:
    small().save_pretrained(tmp_path / "m")
    model = quantized(scheme, tmp_path / "m")
    export_safetensors(model, tmp_path / "q", program="vllm")
    export_safetensors(model, tmp_path / "apart")
    wanted = tensors(tmp_path / "q")
    assert is_joined(wanted) and not is_joined(tensors(tmp_path / "apart"))
    convert(tmp_path / "q", tmp_path / "c", "quark")
    assert same(tensors(tmp_path / "c"), tensors(tmp_path / "apart"))
    convert(tmp_path / "c", tmp_path / "d", "quark", "vllm")
    assert same(tensors(tmp_path / "d"), wanted)

    ways: Any = ((None, "m", "f"), (20_000, "m", "s"), (None, "q", "again"))
    for size, source, goal in ways:
        config, samples = planned(small(), scheme), [tiny.inputs_of(small())] if scheme == "fp8" else None
        given = tmp_path / source, tmp_path / goal, config
        quantize_checkpoint(*given, samples=samples, program="vllm", max_shard_size=size)
        kept = [
            {key: one for key, one in found.items() if source == "m" or not key.endswith("input_scale")}
            for found in (tensors(tmp_path / goal), wanted)
        ]  # inputs of a quantized model are others
        assert same(*kept), goal
        assert (len(list((tmp_path / goal).glob("*.safetensors"))) > 2) is (size is not None)
    quantize_checkpoint(tmp_path / "m", tmp_path / "own", planned(small(), scheme), samples=samples)
    assert same(tensors(tmp_path / "own"), tensors(tmp_path / "apart"))


def test_what_vllm_does_not_read_is_refused(tmp_path: Path) -> None:
    """Before work, and where a model that is quantized already is written."""
    plain = LLMTemplate.for_model(small())
    cases: Any = [
        ("fp8", {}, None),
        ("int4_wo_32", {}, r"whose rows take turns .*\.experts\.0\.gate_proj' would be int4"),
        ("mxfp6_e2m3", {}, "would be mxfp6_e2m3"),
        ("mxfp8", {}, "would be mxfp8"),
        ("nvfp4", {}, "would be nvfp4"),
        ("fp8", {"exclude": ["*experts*"]}, "would be float"),
        ("fp8", {"exclude": ["*experts.2.down_proj"]}, "experts.2.down_proj' would be float"),
        ("fp8", {"layer_quant_config": {"*down_proj": plain.get_config("mxfp4").global_quant_config}}, "in one scheme"),
        (
            "mxfp4",
            {"layer_quant_config": {"*self_attn*": plain.get_config("fp8").global_quant_config}},
            "looks for the",
        ),
        ("mxfp4", {"layer_quant_config": {"*.self_attn.*": plain.get_config("fp8").global_quant_config}}, None),
        (
            "fp8",
            {"layer_quant_config": {"*.experts.*": plain.get_config("mxfp4").global_quant_config}},
            "looks for the",
        ),
        ("fp8", {"layer_quant_config": {"*experts*": plain.get_config("mxfp4").global_quant_config}}, None),
        ("fp8", {"exclude": []}, "'lm_head' is quantized, which vLLM holds in float"),
    ]
    for scheme, more, why in cases:
        model = small()
        config = planned(model, scheme, **more)
        if why is None:
            check_before_work(model, config, "quark", "vllm", tmp_path)
            continue
        with pytest.raises(ConfigError, match=why):
            check_before_work(model, config, "quark", "vllm", tmp_path)
        made = ModelQuantizer(config).quantize_model(model, [tiny.inputs_of(model)])
        with pytest.raises(ConfigError, match=why.rpartition(" would")[2]):  # stacks that stay float are named whole
            export_safetensors(made, tmp_path / "no", program="vllm")
        assert not (tmp_path / "no").exists()


def test_gate_and_up_have_one_scale(tmp_path: Path) -> None:
    """Without ``--for vllm`` while it is quantized they have their own, and no file is written."""
    model = small()
    config = LLMTemplate.for_model(model).get_config("fp8")
    ModelQuantizer(config).quantize_model(model, [tiny.inputs_of(model)])
    with pytest.raises(ConfigError, match=r"gate_up_proj\.weight_scale' would be .* for the rows of gate and .* of up"):
        export_safetensors(model, tmp_path / "q", program="vllm")
    assert not (tmp_path / "q").exists()
    export_safetensors(model, tmp_path / "q")


def test_the_card_says_who_reads_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = quantized("mxfp4")
    with caplog.at_level(logging.ERROR):
        for program in ("vllm", None):
            folder = tmp_path / str(program)
            export_safetensors(model, folder, program=program)
            write_card(folder, folder, Card("base", "mxfp4", "words", "quark", (), None, 0, None, (2, 1)))
            assert ("Not for transformers: gate and up" in (folder / "README.md").read_text()) is (program == "vllm")
