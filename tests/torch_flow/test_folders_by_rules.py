"""Folders as other programs publish them, built by the rules of their formats: every command has the same values.

The makers know nothing of the package: they draw codes, scales and zero points, pack them bit by bit, and say what the
values are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.pairs import pairs, thinned
from tests.torch_flow.export.networks import llama, logits
from tests.torch_flow.test_other_programs import entry, nf4, nvfp4, typed

from quark.errors import QuarkError
from quark.torch import import_model_from_safetensors
from quark.torch.files.foreign import convert
from quark.torch.files.prequantized import dequantize_checkpoint
from quark.torch.language import load_model
from quark.torch.quantized_layer import quantized_layers

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore")
Tensors = dict[str, torch.Tensor]
Made = tuple[Tensors, torch.Tensor]
POWERS = torch.float8_e8m0fnu


def blocks(
    weight: torch.Tensor,
    draw: torch.Generator,
    size: tuple[int, int] = (32, 32),
    dtype: torch.dtype = torch.float32,
    powers: bool = False,
    name: str = "weight_scale_inv",
) -> Made:
    """FP8 under a scale for each block, the last ones shorter; powers of two as floats, as E8M0, or as bytes."""
    rows, columns = weight.shape
    grid = -(-rows // size[0]), -(-columns // size[1])
    codes = (torch.randn(weight.shape, generator=draw) * 60).to(torch.float8_e4m3fn)
    exponents = torch.randint(116, 122, grid, generator=draw)
    scale = 2.0 ** (exponents - 127) if powers else torch.rand(grid, generator=draw) * 0.01 + 0.001
    stored = exponents.to(torch.uint8) if dtype is torch.uint8 else scale.to(dtype)
    used = scale if powers else stored.float()
    wide = used.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)[:rows, :columns]
    return {"weight": codes, name: stored}, codes.float() * wide


def rows(weight: torch.Tensor, draw: torch.Generator) -> Made:
    """FP8 under a scale for each row."""
    codes = (torch.randn(weight.shape, generator=draw) * 60).to(torch.float8_e4m3fn)
    scale = torch.rand(len(weight), generator=draw) * 0.01 + 0.001
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale[:, None]


def whole(weight: torch.Tensor, draw: torch.Generator) -> Made:
    """FP8 under one scale, with static inputs."""
    codes = (torch.randn(weight.shape, generator=draw) * 60).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.0034, dtype=torch.bfloat16)
    return {
        "weight": codes,
        "weight_scale_inv": scale,
        "activation_scale": torch.tensor(0.0625),
    }, codes.float() * scale.float()


def stream(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [n, m] as little-endian bits along the first axis, in words of 32."""
    numbers, width = values.numpy().astype(np.uint32), values.shape[1]
    flat = (numbers[:, None] >> np.arange(bits, dtype=np.uint32)[None, :, None] & 1).reshape(-1, 32, width)
    words = (flat.astype(np.uint64) << np.arange(32, dtype=np.uint64)[None, :, None]).sum(1).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32).copy())


def gptq(
    weight: torch.Tensor,
    draw: torch.Generator,
    bits: int = 4,
    lowered: int = 1,
    symmetric: bool = True,
    group: int = 32,
    shuffled: bool = False,
    lowest: int = 1,
) -> Made:
    """Codes of GPTQ; ``lowered`` zero points are version 1, ``shuffled`` groups are those of desc_act."""
    outputs, inputs = weight.shape
    group = inputs if group == -1 else group
    count = -(-inputs // group)
    codes = torch.randint(0, 2**bits, (inputs, outputs), generator=draw)
    scales = (torch.rand((count, outputs), generator=draw) * 0.02 + 0.005).half()
    zeros = torch.full((count, outputs), 2 ** (bits - 1))
    zeros = zeros if symmetric else torch.randint(lowest, 2**bits, (count, outputs), generator=draw)
    index = torch.arange(inputs) // group
    index = index[torch.randperm(inputs, generator=draw)] if shuffled else index
    stored = (zeros - lowered) % 2**bits
    tensors = {"qweight": stream(codes, bits), "qzeros": stream(stored.T, bits).T, "scales": scales}
    values = ((codes - zeros[index]).float() * scales[index].float()).T
    return {**tensors, "g_idx": index.to(torch.int32)}, values


def awq(weight: torch.Tensor, draw: torch.Generator, group: int = 32) -> Made:
    """Codes of AutoAWQ (``WQLinear_GEMM``): eight outputs to a word, in the order 0 2 4 6 1 3 5 7."""
    outputs, inputs = weight.shape
    group = inputs if group == -1 else group
    codes = torch.randint(0, 16, (inputs, outputs), generator=draw)
    zeros = torch.randint(0, 16, (inputs // group, outputs), generator=draw)
    scales = (torch.rand((inputs // group, outputs), generator=draw) * 0.02 + 0.005).half()
    order = [8 * word + place for word in range(outputs // 8) for place in (0, 2, 4, 6, 1, 3, 5, 7)]
    packed = {name: stream(value[:, order].T, 4).T for name, value in (("qweight", codes), ("qzeros", zeros))}
    index = torch.arange(inputs) // group
    return {**packed, "scales": scales}, ((codes - zeros[index]).float() * scales[index].float()).T


def without(name: str, make: Callable[..., Made]) -> Callable[..., Made]:
    """A maker of weights that lack a tensor."""
    return lambda weight, draw: (lambda made: ({k: v for k, v in made[0].items() if k != name}, made[1]))(
        make(weight, draw)
    )


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
UE8M0 = {**FP8, "scale_fmt": "ue8m0"}
GPTQ, AWQ = {"quant_method": "gptq", "bits": 4}, {"quant_method": "awq", "bits": 4, "group_size": 32}
Kind = tuple[Callable[..., Made], dict[str, Any]]
CARRIED: dict[str, Kind] = {
    "blocks": (blocks, FP8),
    "blocks, shorter ones": (partial(blocks, size=(48, 48)), {**FP8, "weight_block_size": [48, 48]}),
    "blocks, scales bfloat16": (partial(blocks, dtype=torch.bfloat16), FP8),
    "blocks, size unsaid": (blocks, {**FP8, "weight_block_size": None}),
    "blocks, weights alone": (blocks, {**FP8, "activation_scheme": None}),
    "ue8m0 in float32": (partial(blocks, powers=True), UE8M0),
    "ue8m0": (partial(blocks, powers=True, dtype=POWERS), UE8M0),
    "ue8m0 in bytes": (partial(blocks, powers=True, dtype=torch.uint8), UE8M0),
    "ue8m0, .scale": (partial(blocks, powers=True, dtype=POWERS, name="scale"), UE8M0),
    "blocks, .qscale_weight": (partial(blocks, name="qscale_weight"), FP8),
    "mxfp8": (
        partial(blocks, size=(1, 32), powers=True, dtype=torch.uint8),
        {**UE8M0, "weight_block_size": [1, 32]},
    ),
    "rows": (rows, {**FP8, "weight_block_size": None}),
    "tensor, static": (whole, {**FP8, "activation_scheme": "static", "weight_block_size": None}),
    "modelopt nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "modelopt w4a16": (without("input_scale", nvfp4), {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}),
    "awq": (awq, AWQ),
    "awq, whole rows": (partial(awq, group=-1), {**AWQ, "group_size": -1, "version": "GEMM"}),
    **{
        f"gptq {bits} v{2 - lowered} {'symmetric' if symmetric else 'asymmetric'}": (
            partial(gptq, bits=bits, lowered=lowered, symmetric=symmetric),
            {**GPTQ, "bits": bits, "checkpoint_format": "gptq" if lowered else "gptq_v2"},
        )
        for bits in (2, 3, 4, 8)
        for lowered, symmetric in ((1, True), (1, False), (0, False))
    },
    "gptq, whole rows": (partial(gptq, group=-1), {**GPTQ, "group_size": -1}),
    "gptq, format": (partial(gptq, lowered=0, symmetric=False), {**GPTQ, "format": "gptq_v2"}),
    "gptq, zero point 0": (partial(gptq, lowered=0, symmetric=False, lowest=0), {**GPTQ, "format": "gptq_v2"}),
    "gptq, dynamic": (partial(gptq, bits=8), {**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}),
}
DECODED: dict[str, Kind] = {  # no grid of ours has the codes, and only weights are quantized
    "gptq, desc_act": (partial(gptq, shuffled=True), {**GPTQ, "desc_act": True}),
    "gptq, desc_act, 8 bits": (partial(gptq, bits=8, shuffled=True), {**GPTQ, "bits": 8}),
    "gptq, shorter group": (partial(gptq, group=48), GPTQ),
    "nf4": (lambda weight, draw: nf4(weight, True, draw), {"quant_method": "bitsandbytes"}),
}
REFUSED: dict[str, tuple[Callable[..., Made], dict[str, Any], str]] = {
    "codes without scales": (without("weight_scale_inv", blocks), FP8, "no scale of it is there"),
    "scales of no blocks": (partial(blocks, size=(20, 20)), FP8, "fits no blocks of"),
    "awq gemv": (awq, {**AWQ, "version": "gemv"}, "unknown layout of awq 'gemv'"),
    "awq, another layout": (awq, {**AWQ, "format": "gemv_fast"}, "unknown layout of awq"),
    "awq, 8 bits": (awq, {**AWQ, "bits": 8}, "bits of AWQ is 4, not 8"),
    "gptq marlin": (gptq, {**GPTQ, "checkpoint_format": "marlin"}, "unknown layout of gptq 'marlin'"),
    "gptq marlin, older": (gptq, {**GPTQ, "is_marlin_format": True}, "unknown layout of gptq 'marlin'"),
    "gptq planar": (partial(gptq, lowered=0), {**GPTQ, "format": "gptq_p"}, "unknown layout of gptq 'gptq_p'"),
    "gptq, other bits": (partial(gptq, bits=8), GPTQ, "holds codes of 8 bits, and config.json says bits=4"),
    "gptq v1, zero point 0": (partial(gptq, symmetric=False, lowest=0), GPTQ, "version 1 of GPTQ has no zero point 0"),
}


def folder_of(make: Callable[..., Made], said: dict[str, Any], folder: Path) -> Tensors:
    """A folder whose layers a maker made, the head float; the values of its weights."""
    model, draw, tensors, values = (
        llama(torch.bfloat16, num_hidden_layers=1),
        torch.Generator().manual_seed(3),
        {},
        {},
    )
    model.save_pretrained(folder)
    for name, value in model.state_dict().items():
        parts, values[name] = {"weight": value}, value
        if value.dim() == 2 and "layers" in name:
            parts, values[name] = make(value, draw)
        tensors |= {f"{name.removesuffix('weight')}{key}": one.clone().contiguous() for key, one in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    entry(folder, quantization_config=said)
    return values


def wrong(found: Tensors, values: Tensors) -> list[str]:
    """The tensors that are others."""
    assert found.keys() <= values.keys()
    return [name for name, value in found.items() if not torch.equal(value, values[name].to(value.dtype))]


def weights(folder: Path) -> Tensors:
    """What the layers of a model in a folder multiply by."""
    return weights_of(load_model(folder))


def weights_of(model: torch.nn.Module) -> Tensors:
    """What the quantized layers of a model multiply by."""
    layers = dict(quantized_layers(model))
    return {f"{name}.weight": layer.fake_quantized()._parameters["weight"].detach() for name, layer in layers.items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", thinned(CARRIED, 2))
def test_every_command_has_the_values(kind: str, tmp_path: Path) -> None:
    """Decoded, loaded, and converted they are those of the maker; a code or a scale that is broken is seen."""
    values = folder_of(*CARRIED[kind], tmp_path / "q")
    dequantize_checkpoint(tmp_path / "q", tmp_path / "f")
    decoded = load_file(tmp_path / "f" / "model.safetensors")
    assert decoded.keys() == values.keys() and not wrong(decoded, values)
    assert len(weights(tmp_path / "q")) == 7 and not wrong(weights(tmp_path / "q"), values)
    for form in ("quark", "compressed-tensors"):
        try:
            convert(tmp_path / "q", tmp_path / form, form, None if form == "quark" else "vllm")
        except QuarkError as error:
            assert form != "quark" and "is not a format of it" in str(error)
            continue
        found = weights(tmp_path / form)
        assert len(found) == 7 and not wrong(found, values)
    path = tmp_path / "q" / "model.safetensors"
    tensors, layer = load_file(path), "model.layers.0.mlp.up_proj."
    for name in [name for name in tensors if name.startswith(layer) and "input" not in name and "activ" not in name]:
        flat = tensors[name].reshape(-1).view(torch.uint8).clone()
        flat[0] ^= 1
        broken = {**tensors, name: flat.view(tensors[name].dtype).reshape(tensors[name].shape)}
        save_file(broken, path)
        try:
            dequantize_checkpoint(tmp_path / "q", tmp_path / name)
        except QuarkError:
            continue  # a zero point that version 1 does not have
        assert wrong(load_file(tmp_path / name / "model.safetensors"), values) == [f"{layer}weight"], name


@pytest.mark.parametrize(("kind", "given"), pairs(CARRIED, [False, True]))
def test_python_reads_what_the_commands_read(kind: str, given: bool, tmp_path: Path) -> None:
    """With a model or without, whatever the folder leaves unsaid about the layers that are float."""
    values = folder_of(*CARRIED[kind], tmp_path / "q")
    model = llama(torch.bfloat16, num_hidden_layers=1) if given else None
    found = weights_of(import_model_from_safetensors(model, tmp_path / "q"))
    assert len(found) == 7 and not wrong(found, values)


@pytest.mark.parametrize("kind", DECODED)
def test_weights_that_no_grid_has_are_computed_with(kind: str, tmp_path: Path) -> None:
    """`evaluate` decodes them; `convert` says why it cannot."""
    values = folder_of(*DECODED[kind], tmp_path / "q")
    model = load_model(tmp_path / "q")
    assert not wrong({name: value.detach() for name, value in model.named_parameters()}, values)
    twin = llama(torch.bfloat16, num_hidden_layers=1)
    twin.load_state_dict({name: value.to(torch.bfloat16) for name, value in values.items()})
    assert torch.equal(logits(model), logits(twin))
    with pytest.raises(QuarkError, match="convert --requantize SCHEME"):
        convert(tmp_path / "q", tmp_path / "c", "quark")


@pytest.mark.parametrize("command", ["quantize", "quantize-files", "convert", "evaluate"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_other_numbers_is_refused(
    kind: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said, sentence = REFUSED[kind]
    folder_of(make, said, tmp_path / "q")
    assert sentence in typed(command, tmp_path / "q", capsys)
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"] == said
