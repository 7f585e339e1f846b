"""Folders whose experts are stacked under FP8 scales, built by the rules of the format: the values of each expert."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.consumers import cell, tiny
from tests.torch_flow.test_folders_by_rules import FP8, POWERS, UE8M0, blocks, weights_of, wrong
from tests.torch_flow.test_other_programs import entry

from quark.cli import main
from quark.errors import ConfigError, QuarkError
from quark.torch import import_model_from_safetensors
from quark.torch.export.write_as import export_as
from quark.torch.files.foreign import convert
from quark.torch.files.prequantized import dequantize_checkpoint

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
Tensors = dict[str, torch.Tensor]
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
TURNED = ("llama4_text",)  # matrices [in, out] in files


def whole(weight: torch.Tensor, draw: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """One scale for a matrix."""
    return blocks(weight, draw, (weight.shape[0], weight.shape[1]))


def rows(weight: torch.Tensor, draw: torch.Generator, axis: int) -> tuple[Tensors, torch.Tensor]:
    """A scale for each output, which are on ``axis``."""
    return blocks(weight, draw, (1, weight.shape[1]) if axis == 0 else (weight.shape[0], 1))


def fp4(weight: torch.Tensor, draw: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """Two codes in a byte, the first in the low half, under a power of two for 32."""
    count, columns = weight.shape
    codes = torch.randint(0, 16, (count, columns), generator=draw)
    exponents = torch.randint(116, 122, (count, columns // 32), generator=draw)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    scale = 2.0 ** (exponents - 127)
    return {"weight": packed, "weight_scale_inv": scale.to(POWERS)}, FP4[codes] * scale.repeat_interleave(32, 1)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "blocks": (lambda turned: blocks, FP8),
    "ue8m0": (lambda turned: partial(blocks, powers=True, dtype=POWERS), UE8M0),
    "rows": (lambda turned: partial(rows, axis=int(turned)), {**FP8, "weight_block_size": None}),
    "whole": (lambda turned: whole, {**FP8, "weight_block_size": None}),
    "across": (lambda turned: partial(blocks, size=(192, 192)), {**FP8, "weight_block_size": [192, 192]}),
    "fp4": (lambda turned: fp4, {**UE8M0, "expert_dtype": "fp4"}),
    "mxfp8": (
        lambda turned: partial(blocks, size=(32, 1) if turned else (1, 32), powers=True, dtype=torch.uint8),
        {**UE8M0, "weight_block_size": None},
    ),
}


TYPES = {
    "llama4_text": ("blocks", "rows", "mxfp8"),
    "minimax_m3_vl_text": ("blocks", "ue8m0", "rows", "whole", "fp4", "mxfp8"),
    "qwen3_vl_moe": ("blocks",),
}


def folder_of(name: str, kind: str, folder: Path) -> Tensors:
    """A folder with coded experts; the values of their layers."""
    turned, (choose, said) = name in TURNED, KINDS[kind]
    make, draw = choose(turned), torch.Generator().manual_seed(5)
    model = tiny.made(name, dict(tiny.model_types())[name], {}).to(torch.bfloat16)
    model.save_pretrained(folder)
    tensors, values = load_file(folder / "model.safetensors"), {}
    for key, stack in list(tensors.items()):
        if stack.dim() == 3 and ".experts." in key:
            made = [make(matrix, draw) for matrix in stack]
            tensors[key] = torch.stack([parts["weight"] for parts, _ in made])
            tensors[f"{key}_scale_inv"] = torch.stack([parts["weight_scale_inv"] for parts, _ in made])
            values |= parts_of(key, torch.stack([value for _, value in made]), turned)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    entry(folder, quantization_config=said)
    return values


def parts_of(name: str, stack: torch.Tensor, turned: bool) -> Tensors:
    """The layers of the experts in a stack; gate before up."""
    at, _, own = name.rpartition(".")
    names = ("down_proj",) if own == "down_proj" else ("gate_proj", "up_proj")
    return {
        f"{at}.{number}.{layer}.weight": part
        for number, matrix in enumerate(stack)
        for layer, part in zip(names, (matrix.T if turned else matrix).chunk(len(names)), strict=True)
    }


def all_parts(folder: Path, turned: bool) -> Tensors:
    """The layers of the experts in all stacks of a float folder."""
    tensors = load_file(folder / "model.safetensors").items()
    stacks = {name: value for name, value in tensors if ".experts." in name and value.dim() == 3}
    return {key: part for name, stack in stacks.items() for key, part in parts_of(name, stack, turned).items()}


CASES = [(name, kind) for name, kinds in TYPES.items() for kind in kinds]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_each_expert_has_the_values_of_its_part(name: str, kind: str, tmp_path: Path) -> None:
    """Loaded, converted, and decoded."""
    values = folder_of(name, kind, tmp_path / "q")
    found = weights_of(import_model_from_safetensors(None, tmp_path / "q"))
    assert values.keys() == found.keys() and not wrong(found, values)
    convert(tmp_path / "q", tmp_path / "c", "quark", "vllm")
    assert not wrong(weights_of(import_model_from_safetensors(None, tmp_path / "c")), values)
    dequantize_checkpoint(tmp_path / "q", tmp_path / "f")
    apart = all_parts(tmp_path / "f", name in TURNED)
    assert apart.keys() == values.keys() and not wrong(apart, values)


@pytest.mark.parametrize("kind", ["blocks", "fp4"])
def test_what_is_broken_is_seen_in_one_expert(kind: str, tmp_path: Path) -> None:
    """A bit of the last code or scale of a stack."""
    values = folder_of("minimax_m3_vl_text", kind, tmp_path / "q")
    path = tmp_path / "q" / "model.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if key.endswith("gate_up_proj"))
    stack, last = key.rpartition(".")[0], len(tensors[key]) - 1
    for broken in (key, f"{key}_scale_inv"):
        flat = tensors[broken].reshape(-1).view(torch.uint8).clone()
        flat[-1] ^= 1
        save_file({**tensors, broken: flat.view(tensors[broken].dtype).reshape(tensors[broken].shape)}, path)
        lost = wrong(weights_of(import_model_from_safetensors(None, tmp_path / "q")), values)
        assert lost == [f"{stack}.{last}.up_proj.weight"], broken


def test_scales_that_gate_and_up_share_are_told(tmp_path: Path) -> None:
    """Blocks that lie across the two: no layer has them, and the values are decoded."""
    values = folder_of("minimax_m3_vl_text", "across", tmp_path / "q")
    with pytest.raises(QuarkError, match="--requantize"):
        convert(tmp_path / "q", tmp_path / "c", "quark")
    dequantize_checkpoint(tmp_path / "q", tmp_path / "f")
    apart = all_parts(tmp_path / "f", False)
    assert apart.keys() == values.keys() and not wrong(apart, values)


@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text", "qwen3_vl_moe", "qwen3_moe"])
def test_single_experts_are_stacked_again_where_the_original_has_stacks(name: str, tmp_path: Path) -> None:
    """A folder with codes for each expert, quantized again: transformers loads what it stands for, and nothing else
    than the stacks may be written for transformers, which stacks them in memory, whatever the original has."""
    float_model = tiny.tiny_model(name, dict(tiny.model_types())[name])
    inputs = tiny.inputs_of(float_model)
    float_model.save_pretrained(tmp_path / "float")
    model = cell.quantize(float_model, "int8_wo_per_channel", inputs)
    wanted = tiny.answer(model, inputs)
    for form in ("quark", "gptq"):
        export_as(model, tmp_path / form, form, tmp_path / "float")
        dequantize_checkpoint(tmp_path / form, tmp_path / f"{form} float", loaded=True)
        loaded, told = cell.load(model, tmp_path / f"{form} float")
        assert not told["missing_keys"] and not told["unexpected_keys"]
        assert cell.difference(tiny.answer(loaded, inputs), wanted) < 1e-5
    with pytest.raises(ConfigError, match="no place for the single experts"):
        export_as(model, tmp_path / "transformers", "gptq", tmp_path / "float", program="transformers")
    words = [
        "--scheme",
        "int8_wo_per_channel",
        "--format",
        "gptq",
        "--for",
        "transformers",
        "-o",
        str(tmp_path / "out"),
    ]
    for command in ("quantize", "quantize-files"):
        assert main(["torch", command, str(tmp_path / "float"), *words, "--for", "transformers"]) == 1
        assert not (tmp_path / "out").exists()
    words = ["--scheme", "int8_wo_per_channel", "--json", "-o", str(tmp_path / "again")]
    assert main(["torch", "quantize", str(tmp_path / "gptq"), *words]) == 0
    again = import_model_from_safetensors(None, tmp_path / "again")
    assert cell.difference(tiny.answer(again, inputs), wanted) < 1e-5
