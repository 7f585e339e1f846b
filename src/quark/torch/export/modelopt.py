"""Checkpoints under the names of NVIDIA ModelOpt: ``custom_mode="modelopt"``, with ``hf_quant_config.json`` beside.

    weight, weight_scale, weight_scale_2   codes, scales, and the scale above NVFP4 blocks
    input_scale                            static scale of the input (above its blocks for NVFP4)
    k_proj.k_scale, v_proj.v_scale         FP8 caches

``ALGORITHMS`` are those of ModelOpt that have a scheme here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from quark import __version__
from quark.errors import ConfigError
from quark.numerics.blocks import Block
from quark.numerics.granularity import Channel, Granularity, Tensor
from quark.torch.config.model import QConfig, QLayerConfig
from quark.torch.export.decoded import Decoder, Parts, fp4_values, fp8_decoder, powers_of_two
from quark.torch.stage import Stage

FILE = "hf_quant_config.json"
RENAMED = (
    (r"\.input_scale_2$", ".input_scale"),
    (r"\.k_proj\.output_scale$", ".k_proj.k_scale"),
    (r"\.v_proj\.output_scale$", ".v_proj.v_scale"),
)
# format and scales of the weight, of the input, whether the input is dynamic → quant_algo, group_size
ALGORITHMS: dict[tuple[str, str | None, bool], tuple[str, int | None]] = {
    ("fp8_e4m3 tensor", "fp8_e4m3 tensor", False): ("FP8", None),
    ("fp8_e4m3 channel", "fp8_e4m3 token", True): ("FP8_PER_CHANNEL_PER_TOKEN", None),
    ("nvfp4", "nvfp4", False): ("NVFP4", 16),
    ("nvfp4", None, False): ("W4A16_NVFP4", 16),
    ("mxfp8_e4m3", "mxfp8_e4m3", True): ("MXFP8", 32),
}


def modelopt_config(config: QConfig, excluded: Iterable[str]) -> dict[str, Any]:
    """``quantization_config`` in ModelOpt's words.

    Args:
        config: of the model; all layers are alike.
        excluded: names of linear layers that stay float.

    Raises:
        ConfigError: a configuration that is none of ``ALGORITHMS``.
    """
    layer = config.global_quant_config
    weight, inputs = word_of(layer, "weight"), word_of(layer, "input_tensors")
    dynamic = any(stage.spec.dynamic for stage in layer.stages("input_tensors"))
    found = ALGORITHMS.get((str(weight), inputs, dynamic))
    if found is None or layer.output_tensors is not None or layer.bias is not None:
        known = ", ".join(name for name, _ in ALGORITHMS.values())
        raise ConfigError(
            f"custom_mode 'modelopt' does not fit this configuration: the weight is {weight}, the input "
            f"{inputs or 'float'}{' (dynamic)' if dynamic else ''}, and ModelOpt's algorithms are {known}"
        )
    caches = [value.stages("output_tensors") for value in config.kv_cache_quant_config.values()]
    if not all(len(stages) == 1 and word(stages[0], False) == "fp8_e4m3 tensor" for stages in caches):
        raise ConfigError("custom_mode 'modelopt' does not fit: keys and values must be fp8 per_tensor")
    algorithm, group = found
    made: dict[str, Any] = {"quant_algo": algorithm, "ignore": list(excluded), "quant_method": "modelopt"}
    made["producer"] = {"name": "quark", "version": __version__}
    made["kv_cache_scheme"] = {"type": "float", "num_bits": 8, "dynamic": False} if caches else None
    return made if group is None else {**made, "group_size": group}


def word_of(layer: QLayerConfig, slot: str) -> str | None:
    """What a slot is, as ``ALGORITHMS`` calls it."""
    stages = layer.stages(slot)
    return None if not stages else " + ".join(word(stage, slot == "input_tensors") for stage in stages)


def word(stage: Stage, activation: bool) -> str:
    """Format and scales of a stage."""
    row = stage.format
    if isinstance(row, Block):
        plain = not row.tensor_scale or (row.rule, row.size) == ("e4m3", 16)
        return row.name.removesuffix("_even") if plain else f"{row.name} of {row.size} under {row.rule} scales"
    return f"{row.name} {scales(stage.spec.granularity, activation)}"


def scales(granularity: Granularity, activation: bool) -> str:
    """Which elements share a scale."""
    match granularity:
        case Tensor():
            return "tensor"
        case Channel(axis=0) if not activation:
            return "channel"
    return "token" if activation else str(granularity)


def nvfp4_values(parts: Parts) -> torch.Tensor:
    """FP4 codes, low nibbles first, under E4M3 scales of 16, under one scale."""
    codes = fp4_values(parts["weight"])
    scale = parts["weight_scale"].float() * parts["weight_scale_2"].float()
    return codes * of_blocks(scale, codes, 16)


def mxfp8_values(parts: Parts) -> torch.Tensor:
    """E4M3 codes under powers of two of 32."""
    codes = parts["weight"].view(torch.float8_e4m3fn).float()
    return codes * of_blocks(powers_of_two(parts["weight_scale"]), codes, 32)


def of_blocks(scale: torch.Tensor, codes: torch.Tensor, size: int) -> torch.Tensor:
    """The scale of every code, in blocks along the rows."""
    wanted = (*codes.shape[:-1], codes.shape[-1] // size)
    if tuple(scale.shape) != wanted:
        raise ValueError(f"{list(scale.shape)} scales where blocks of {size} need {list(wanted)}")
    return scale.repeat_interleave(size, -1)


def decoder_of(algorithm: str) -> tuple[tuple[str, ...], Decoder]:
    """The tensors of a weight, and what their values are, by the rules of one of ``ALGORITHMS``."""
    if algorithm.endswith("NVFP4"):
        return ("weight", "weight_scale", "weight_scale_2"), nvfp4_values
    plain = fp8_decoder(None)
    scaled = lambda found: plain({"weight": found["weight"], "scale": found["weight_scale"]})  # noqa: E731
    return ("weight", "weight_scale"), mxfp8_values if algorithm.startswith("MX") else scaled


def write_beside(folder: Path, described: Mapping[str, Any]) -> None:
    """``hf_quant_config.json``, which TensorRT-LLM and older vLLM read."""
    inner = {
        "quant_algo": described["quant_algo"],
        "kv_cache_quant_algo": "FP8" if described["kv_cache_scheme"] else None,
        "exclude_modules": described["ignore"],
    }
    if "group_size" in described:
        inner["group_size"] = described["group_size"]
    whole = {"producer": described["producer"], "quantization": inner}
    (folder / FILE).write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
