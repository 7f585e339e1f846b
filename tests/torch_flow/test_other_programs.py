"""Folders of other programs, built by their documents: values by their rules, or one sentence; and nothing silent."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.torch_flow.export.networks import llama, logits
from tests.torch_flow.export.test_reload import quantized

from quark.cli import main
from quark.errors import ConfigError, ModelError
from quark.torch import LLMTemplate
from quark.torch.export.write_as import export_as
from quark.torch.files.foreign import convert, quantized_model
from quark.torch.files.grids import scheme_of
from quark.torch.files.prequantized import dequantize_checkpoint, method_of
from quark.torch.language import load_model

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore")
Tensors = dict[str, torch.Tensor]
#: The table of NF4 (QLoRA, appendix E).
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nf4(weight: torch.Tensor, nested: bool, draw: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """A weight of 4 bits by bitsandbytes with random codes, its scales plain or quantized; and its values."""
    codes = torch.randint(0, 16, weight.shape, generator=draw)
    flat, count = codes.reshape(-1), weight.numel() // 64
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    scales = torch.rand(count, generator=draw) + 0.5
    made: Tensors = {"absmax": scales}
    if nested:
        absmax = torch.randint(0, 256, (count,), generator=draw, dtype=torch.uint8)
        table, steps = torch.linspace(-1, 1, 256), torch.rand(-(-count // 256), generator=draw)
        state |= {"nested_blocksize": 256, "nested_offset": 0.75, "nested_dtype": "float32"}
        made = {"absmax": absmax, "nested_quant_map": table, "nested_absmax": steps}
        scales = torch.stack([table[int(absmax[k])] * steps[k // 256] + 0.75 for k in range(count)])
    values = torch.stack([torch.tensor(NF4)[flat[64 * k : 64 * k + 64]] * scales[k] for k in range(count)])
    packed = (flat[0::2] << 4 | flat[1::2]).to(torch.uint8)[:, None]
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    made |= {"quant_map": torch.tensor(NF4), "quant_state.bitsandbytes__nf4": text}
    return {"weight": packed, **{f"weight.{key}": one for key, one in made.items()}}, values.reshape(weight.shape)


def int8(weight: torch.Tensor, draw: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """A weight of LLM.int8()."""
    codes = torch.randint(-127, 128, weight.shape, generator=draw, dtype=torch.int8)
    largest = torch.rand(len(weight), generator=draw) + 0.5
    extra = {"SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {"weight": codes, **extra}, codes * (largest / 127)[:, None]


def nvfp4(weight: torch.Tensor, draw: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """A weight of NVFP4 by ModelOpt: FP4 under FP8 scales of 16, under one of the tensor."""
    codes = torch.randint(0, 16, weight.shape, generator=draw)
    scale = torch.rand((len(weight), weight.shape[1] // 16), generator=draw).add(0.5).to(torch.float8_e4m3fn)
    above = torch.tensor(0.03125)
    values = torch.tensor([*FP4, *(-level for level in FP4)])[codes] * (scale.float() * above).repeat_interleave(16, 1)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": above, "input_scale": torch.tensor(1.0)}, values


def fp8(weight: torch.Tensor, draw: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """A weight of FP8 by ModelOpt, with a static input."""
    codes, scale = (torch.randn(weight.shape, generator=draw) * 60).to(torch.float8_e4m3fn), torch.tensor(0.00390625)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.0625)}, codes.float() * scale


def blocks(weight: torch.Tensor, draw: torch.Generator, bits: int = 0) -> tuple[Tensors, torch.Tensor]:
    """A weight of FP8 in blocks of 32 × 32: E5M2, or E4M3 under one power of two for 32 as a byte (``bits`` = 8)."""
    codes = (torch.randn(weight.shape, generator=draw) * 60).to(torch.float8_e4m3fn if bits else torch.float8_e5m2)
    sizes = (1 if bits else 32, 32)
    powers = torch.randint(118, 122, [x // y for x, y in zip(weight.shape, sizes, strict=True)], generator=draw)
    scale = torch.exp2(powers.float() - 127)
    values = codes.float() * scale.repeat_interleave(sizes[0], 0).repeat_interleave(32, 1)
    return {"weight": codes, "weight_scale_inv": powers.to(torch.uint8) if bits else scale}, values


def rows(weight: torch.Tensor, draw: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """A weight of FP8 by FBGEMM: a scale for each row, and a bound of those of inputs."""
    codes = (torch.randn(weight.shape, generator=draw) * 60).to(torch.float8_e4m3fn)
    scale = torch.rand((len(weight), 1), generator=draw) + 0.5
    return {"weight": codes, "weight_scale": scale, "input_scale_ub": torch.tensor([1200.0])}, codes.float() * scale


Made = Callable[[torch.Tensor, torch.Generator], tuple[Tensors, torch.Tensor]]
FOLDERS: dict[str, tuple[Made, dict[str, Any], str]] = {  # a weight, what is said, and in which file
    "nf4": (lambda weight, draw: nf4(weight, False, draw), {"quant_method": "bitsandbytes"}, "config.json"),
    "nf4 nested": (lambda weight, draw: nf4(weight, True, draw), {"quant_method": "bitsandbytes"}, "config.json"),
    "int8": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "config.json"),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "config.json"),
    "nvfp4 beside": (nvfp4, {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, "hf_quant_config.json"),
    "fp8": (fp8, {"quant_algo": "FP8", "producer": {"name": "modelopt"}}, "config.json"),
    "e5m2": (blocks, {"quant_method": "fp8", "weight_block_size": [32, 32]}, "config.json"),
    "mxfp8": (lambda weight, draw: blocks(weight, draw, 8), {"quant_method": "mxfp8"}, "config.json"),
    "fbgemm": (rows, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "config.json"),
    "fp8 beside": (fp8, {"quantization": {"quant_algo": "FP8"}}, "hf_quant_config.json"),
}


SCALES = ("weight_scale_2", "weight_scale_inv", "weight_scale")


def folder_of(kind: str, folder: Path) -> Tensors:
    """A folder as another program writes it; the values of its weights."""
    make, said, file = FOLDERS[kind]
    model, draw, tensors, values = llama(torch.bfloat16), torch.Generator().manual_seed(3), {}, {}
    model.save_pretrained(folder)
    for name, value in model.state_dict().items():
        if value.dim() == 2 and "layers" in name:
            parts, values[name] = make(value, draw)
            tensors |= {f"{name.removesuffix('weight')}{key}": one.contiguous() for key, one in parts.items()}
        else:
            tensors[name] = values[name] = value.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    whole = {**config, "quantization_config": said} if file == "config.json" else said
    (folder / file).write_text(json.dumps(whole))
    return values


@pytest.mark.parametrize("kind", FOLDERS)
def test_values_are_those_of_the_rules(kind: str, tmp_path: Path) -> None:
    values = folder_of(kind, tmp_path / "q")
    dequantize_checkpoint(tmp_path / "q", tmp_path / "f")
    found = load_file(tmp_path / "f" / "model.safetensors")
    assert found.keys() == values.keys()
    assert {name for name, value in values.items() if not torch.equal(found[name], value)} == set()
    path = tmp_path / "q" / "model.safetensors"  # a broken scale, or code, is seen
    tensors = load_file(path)
    layer, ends = "model.layers.0.mlp.up_proj.", ("weight.absmax", "SCB", *SCALES)
    scale = next(f"{layer}{end}" for end in ends if f"{layer}{end}" in tensors)
    for name in ("model.layers.1.mlp.up_proj.weight", scale):
        own = tensors[name].reshape(-1)
        tensors[name] = (own.view(torch.uint8) ^ 1).view(own.dtype).reshape(tensors[name].shape)
    save_file(tensors, path)
    dequantize_checkpoint(tmp_path / "q", tmp_path / "g")
    again = load_file(tmp_path / "g" / "model.safetensors")
    wrong = {name.split(".")[2] for name, value in values.items() if not torch.equal(again[name], value)}
    assert wrong == {"0", "1"}


@pytest.mark.parametrize("command", ["quantize", "quantize-files"])
@pytest.mark.parametrize("kind", ["nf4 nested", "fp8 beside", "nvfp4", "e5m2", "fbgemm"])
def test_they_are_quantized_again(command: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = folder_of(kind, tmp_path / "q")
    words = ["--scheme", "int8_wo_per_channel", "--json"]
    assert main(["torch", command, str(tmp_path / "q"), "-o", str(tmp_path / "out"), *words]) == 0
    assert json.loads(capsys.readouterr().out)["decoded_from"] in ("bitsandbytes", "modelopt", "fp8", "fbgemm_fp8")
    model = load_model(tmp_path / "out")
    for name in ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"):
        layer, wanted = model.get_submodule(name), values[f"{name}.weight"]
        weight = layer.fake_quantized()._parameters["weight"].float()  # type: ignore[operator,union-attr]
        assert (weight - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("kind", ["fp8", "fp8 beside"])
def test_fp8_of_modelopt_keeps_its_codes(kind: str, tmp_path: Path) -> None:
    folder_of(kind, tmp_path / "q")
    convert(tmp_path / "q", tmp_path / "c", "fp8")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in "qc")
    codes = [name for name, value in before.items() if value.dtype is torch.float8_e4m3fn]
    assert len(codes) == 14
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in codes)
    assert torch.equal(logits(load_model(tmp_path / "q")), logits(load_model(tmp_path / "c")))
    assert not (tmp_path / "c" / "hf_quant_config.json").exists()


def test_what_we_write_as_modelopt_is_read(tmp_path: Path) -> None:
    cases = {"fp8": (None, "fp8"), "nvfp4": (None,), "mxfp8": (None,), "ptpc_fp8": (None,)}
    for scheme, cache in [(scheme, cache) for scheme, caches in cases.items() for cache in caches]:
        config = LLMTemplate.get("llama").get_config(scheme, kv_cache_scheme=cache)
        model = quantized(llama(), replace(config, kv_cache_post_rope=cache is not None))
        export_as(model, tmp_path / f"{scheme} {cache}", "modelopt", tmp_path, program="vllm")
        again = quantized_model(tmp_path / f"{scheme} {cache}")
        assert torch.equal(logits(again), logits(model)), scheme


@pytest.mark.parametrize(
    ("kind", "word"), [("nf4", "bitsandbytes"), ("int8", "bitsandbytes"), ("e5m2", "E5M2"), ("fbgemm", "_scale_ub")]
)
def test_codes_that_no_format_has_are_refused(
    kind: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of(kind, tmp_path / "q")
    assert main(["torch", "convert", str(tmp_path / "q"), "-o", str(tmp_path / "o"), "--format", "quark"]) == 1
    said = capsys.readouterr().err
    assert "--requantize SCHEME" in said and word in said


def entry(folder: Path, **said: Any) -> None:
    """Change ``config.json``; None takes an entry away."""
    config = json.loads((folder / "config.json").read_text()) | said
    text = json.dumps({key: value for key, value in config.items() if value is not None})
    (folder / "config.json").write_text(text)


COMMANDS = {
    "quantize": ["--scheme", "int8_wo_per_channel", "-o", "o"],
    "quantize-files": ["--scheme", "int8_wo_per_channel", "-o", "o"],
    "convert": ["--format", "quark", "-o", "o"],
    "evaluate": ["--data", "ids.npy"],
}


def typed(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says of a folder that it refuses."""
    import numpy as np

    np.save(folder.parent / "ids.npy", np.arange(40)[None])
    words = [str(folder.parent / word) if word in ("o", "ids.npy") else word for word in COMMANDS[command]]
    assert main(["torch", command, str(folder), *words]) == 1
    assert not (folder.parent / "o").exists()
    return capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("scheme", ["fp8", "int4_wo_32", "mxfp4_weight_only"])
def test_codes_that_nothing_describes_are_refused(
    scheme: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FP8 weights would else be taken for floats without their scales."""
    model = quantized(llama(), LLMTemplate.get("llama").get_config(scheme))
    export_as(model, tmp_path / "q", "compressed-tensors", tmp_path, program="vllm")
    entry(tmp_path / "q", quantization_config=None)
    assert "holds the codes of a quantized model" in typed(command, tmp_path / "q", capsys)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("method", ["torchao", "hqq", "quanto", "eetq", "aqlm", "bitnet"])
def test_other_methods_are_named(method: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path / "q")
    entry(tmp_path / "q", quantization_config={"quant_method": method})
    said = typed(command, tmp_path / "q", capsys)
    assert f"quantized by {method} is not read" in said and "bitsandbytes" in said and "float model" in said


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("key", ["transform_config", "sparsity_config"])
def test_what_changes_values_beside_codes_is_refused(
    key: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = quantized(llama(), LLMTemplate.get("llama").get_config("int8_wo_per_channel"))
    export_as(model, tmp_path / "q", "compressed-tensors", tmp_path)
    said = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    entry(tmp_path / "q", quantization_config={**said, key: {"config_groups": {}}})
    assert f"{key} of compressed-tensors" in typed(command, tmp_path / "q", capsys)


FORMATS: dict[str, tuple[dict[str, Any], str]] = {  # what is changed in the description, and what is said of it
    "legacy": ({"format": "marlin-24"}, "unknown format of compressed-tensors 'marlin-24'"),
    "inputs in another order": ({"weights": {"actorder": "group"}}, "actorder of compressed-tensors is 'group'"),
    "no zero points": ({"weights": {"symmetric": False}}, "not symmetric, and its weight_zero_point is missing"),
    "blocks": ({"weights": {"strategy": "block", "block_structure": [32, 32]}}, r"by block needs 8"),
    "floats": ({"quantization_status": "frozen"}, "is bfloat16 beside scales, and not codes"),
    "dense": ({"sparsity_config": {"format": "dense", "sparsity_structure": "2:4"}}, ""),
}


@pytest.mark.parametrize("case", FORMATS)
def test_what_compressed_tensors_says_and_stores_belongs_together(case: str, tmp_path: Path) -> None:
    """Floats that are rounded while programs run were multiplied by their scales, without a word."""
    change, why = FORMATS[case]
    model = quantized(llama(torch.bfloat16), LLMTemplate.get("llama").get_config("int8_wo_per_channel"))
    export_as(model, tmp_path / "q", "compressed-tensors", tmp_path)
    dequantize_checkpoint(tmp_path / "q", tmp_path / "before")
    said = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    group = said["config_groups"]["group_0"]
    group["weights"] |= change.get("weights", {})
    group["format"] = change.get("format", group["format"])
    entry(tmp_path / "q", quantization_config={**said, **{k: v for k, v in change.items() if k != "weights"}})
    path = tmp_path / "q" / "model.safetensors"
    if case in ("floats", "blocks"):
        stored = load_file(path)
        codes = [name for name in stored if name.endswith(".weight_packed")]
        for name in codes:
            del stored[name.replace("_packed", "_shape")]
            packed = stored.pop(name)
            size = (packed.shape[0], packed.shape[1] * 4)
            stored[name.removesuffix("_packed")] = torch.ones(size).to(
                torch.int8 if case == "blocks" else torch.bfloat16
            )
        save_file(stored, path, {"format": "pt"})
    with pytest.raises((ConfigError, ModelError), match=why) if why else nullcontext():
        dequantize_checkpoint(tmp_path / "q", tmp_path / "after")
    if not why:
        before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "after"))
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_layer_that_several_groups_name_has_the_scheme_of_the_library() -> None:
    """Names before patterns before classes, each by the alphabet: not in the order of the groups."""
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = llama()
    targets = (["re:.*proj"], ["Linear"], ["re:.*down_proj", "model.layers.1.mlp.up_proj"], ["re:.*_proj"])
    groups = {
        f"group_{bits}": {"targets": names, "weights": {"num_bits": bits, "type": "int"}}
        for bits, names in zip((8, 6, 4, 5), targets, strict=True)
    }
    known = QuantizationConfig.model_validate({"config_groups": groups, "format": "pack-quantized"})
    apply_quantization_config(model, known)
    bits = {
        name: module.quantization_scheme.weights.num_bits
        for name, module in model.named_modules()
        if hasattr(module, "quantization_scheme")
    }
    assert len({*bits.values()}) == 3
    assert {name: scheme_of(name, known).weights.num_bits for name in bits} == bits


def test_older_places_of_the_description(tmp_path: Path) -> None:
    """In files beside, under an older name, or in a part of the configuration."""
    model = quantized(llama(), LLMTemplate.get("llama").get_config("int4_wo_32"))
    for form, file in (("gptq", "quantize_config.json"), ("awq", "quant_config.json")):
        folder = tmp_path / form
        export_as(model, folder, form, tmp_path, program="vllm")
        said = json.loads((folder / "config.json").read_text())["quantization_config"]
        older = {"w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True}
        (folder / file).write_text(json.dumps(said if form == "gptq" else older))
        entry(folder, quantization_config=None)
        assert method_of(folder) == form and torch.equal(logits(load_model(folder)), logits(model))
    export_as(model, tmp_path / "ct", "compressed-tensors", tmp_path, program="vllm")
    said = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    entry(tmp_path / "ct", quantization_config=None, compression_config=said)
    assert torch.equal(logits(load_model(tmp_path / "ct")), logits(model))
    entry(tmp_path / "ct", compression_config=None, text_config={"quantization_config": said})
    assert method_of(tmp_path / "ct") == "compressed-tensors"


@pytest.mark.parametrize(
    ("said", "ends", "why"),
    [
        ({"quant_method": "mxfp4"}, {"blocks": (64, 2, 16), "scales": (64, 2)}, r"\[64, 2, 16\]; MXFP4 of gpt_oss"),
        ({"quant_method": "mxfp4"}, {"packed": (64, 32), "scale": (64, 2)}, "weight_packed'.*as 'mxfp4' stores them"),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, {"packed": (64, 8)}, "layout of awq 'llm-awq'"),
    ],
)
def test_layouts_that_have_no_decoder(
    said: dict[str, Any], ends: dict[str, tuple[int, ...]], why: str, tmp_path: Path
) -> None:
    llama().save_pretrained(tmp_path / "q")
    entry(tmp_path / "q", quantization_config=said)
    tensors = {f"model.layers.0.mlp.up_proj.weight_{end}": torch.zeros(s, dtype=torch.uint8) for end, s in ends.items()}
    save_file(tensors, tmp_path / "q" / "model.safetensors", {"format": "pt"})
    with pytest.raises((ConfigError, ModelError), match=why):
        dequantize_checkpoint(tmp_path / "q", tmp_path / "f")


@pytest.mark.parametrize(
    ("kind", "role", "wrong"),
    [("fp8", "weight", torch.bfloat16), ("nvfp4", "weight", torch.float32), ("awq", "qweight", torch.int64),
     ("gptq", "qzeros", torch.float32)],
)  # fmt: skip
def test_codes_have_their_type(kind: str, role: str, wrong: torch.dtype, tmp_path: Path) -> None:
    """Floats were multiplied by scales of codes, and longer words read from their first bytes."""
    if kind in FOLDERS:
        folder_of(kind, tmp_path / "q")
    else:
        model = quantized(llama(), LLMTemplate.get("llama").get_config("uint4_wo_32"))
        export_as(model, tmp_path / "q", kind, tmp_path, program="vllm" if kind == "awq" else None)
    path, name = tmp_path / "q" / "model.safetensors", f"model.layers.0.mlp.up_proj.{role}"
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name].to(wrong)}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=f"'{name}' is {str(wrong).removeprefix('torch.')}, and such codes are"):
        dequantize_checkpoint(tmp_path / "q", tmp_path / "f")


def test_a_broken_description_of_bitsandbytes(tmp_path: Path) -> None:
    folder_of("nf4", tmp_path / "q")
    path = tmp_path / "q" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"
    tensors[name] = torch.tensor(list(b'{"shape": [4, -1]}'), dtype=torch.uint8)
    save_file(tensors, path)
    with pytest.raises(ModelError, match="must say the shape and the blocksize"):
        dequantize_checkpoint(tmp_path / "q", tmp_path / "f")
    folder_of("fp8", tmp_path / "w")
    entry(tmp_path / "w", quantization_config={"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"})
    with pytest.raises(ConfigError, match="quant_algo of ModelOpt"):
        dequantize_checkpoint(tmp_path / "w", tmp_path / "g")
