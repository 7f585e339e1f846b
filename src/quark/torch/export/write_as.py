"""A quantized model written in any format by its name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.errors import ConfigError, as_a, check_name
from quark.files.folder import new_folder
from quark.numerics.elements import Int
from quark.torch.config.model import QConfig
from quark.torch.experts import UnfusedExperts, is_fused
from quark.torch.export.checkpoint import read_checkpoint
from quark.torch.export.compressed_tensors import check_before as check_compressed
from quark.torch.export.compressed_tensors import export_compressed_tensors
from quark.torch.export.custom_modes import has_one_scale
from quark.torch.export.formats import FORMATS, quantizes_behind_rope
from quark.torch.export.genai import check_runs, write_config
from quark.torch.export.gguf_model import check_before, export_gguf
from quark.torch.export.gguf_tensors import FileLoss
from quark.torch.export.gptq import check_words
from quark.torch.export.huggingface import export_safetensors
from quark.torch.export.layout import check_blocks
from quark.torch.export.model_files import copy_beside
from quark.torch.export.onnx_model import FILE, export_onnx
from quark.torch.export.reader_scales import with_scales_in
from quark.torch.export.shards import SHARD_SIZE
from quark.torch.export.skeleton import is_inside_attention
from quark.torch.export.stacked_blocks import MODE, check_stacks
from quark.torch.export.vllm_reads import check_for_vllm
from quark.torch.matching import match

SIDES = {  # of a weight that the codes of a format are packed along; formats that hold linear layers alone
    "compressed-tensors": (), "awq": ("outputs",), "gptq": ("outputs", "inputs"), "modelopt": (), "fp8": (),
}  # fmt: skip
#: A tensor of stacked experts in a checkpoint: no module of its own, and so no ``.weight``.
STACKED = re.compile(r"experts\.(gate_up_proj|up_proj|down_proj)(_blocks)?$")


def export_as(
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    format: str,
    source: str | os.PathLike[str],
    max_shard_size: int = SHARD_SIZE,
    verify: bool = True,
    program: str | None = None,
) -> FileLoss | None:
    """Write a quantized language model.

    Args:
        model: quantized; it is not changed.
        output_dir: new folder, or one without a model in it.
        format: a name of ``FORMATS``.
        source: the folder that the model came from, with its tokenizer.
        max_shard_size: bytes of tensors per file, in formats that have several.
        verify: what is written in safetensors files is read back and compared.
        program: that will read it, if it is known.

    Returns:
        What the file loses against the values of the model, in a format whose scales may have to be rounded (GGUF).

    Raises:
        ConfigError: an unknown format, or a scheme that it cannot hold.
    """
    check_name("format", format, FORMATS)
    mode = FORMATS[format].mode
    if mode is not None:
        export_safetensors(model, output_dir, mode, max_shard_size=max_shard_size, verify=verify, program=program)
        return None
    if format == "compressed-tensors":
        export_compressed_tensors(model, output_dir, max_shard_size, program, verify)
        return None
    return WRITERS[format](model, Path(output_dir), Path(source), verify)


def to_gguf(model: nn.Module, folder: Path, source: Path, verify: bool) -> FileLoss:
    """One file for llama.cpp; what is not quantized keeps its type."""
    config: Any = getattr(model, "config", None)
    return export_gguf(model, folder, str(getattr(config, "model_type", type(model).__name__)), source, verify=verify)


def to_onnx(model: nn.Module, folder: Path, source: Path, verify: bool) -> None:
    """One graph from token ids and a cache to logits and the cache after them, any number of texts and tokens; with
    the tokenizer and settings that onnxruntime-genai runs it by."""
    export_onnx(model, folder, torch.zeros(1, 1, dtype=torch.int64), use_cache=True, verify=verify)
    with new_folder(folder, beside=True) as draft:
        write_config(model, draft, folder / FILE)
        copy_beside(model, draft)


WRITERS: Mapping[str, Callable[[nn.Module, Path, Path, bool], FileLoss | None]] = {"gguf": to_gguf, "onnx": to_onnx}
CAST = {  # formats whose readers hold the scales of integers in another type: which, None for that of the model
    "compressed-tensors": None,
    "awq": None,
    "gptq": None,
    "gguf": torch.float16,
}


def check_experts(model: nn.Module, config: QConfig, format: str, program: str | None, source: Path) -> None:
    """Refuse, before any work, experts (for vLLM caches too) that the program would read wrongly in the format.

    transformers stacks the experts of a compressed-tensors file in float while it loads it: inputs are then not
    quantized, and experts that the checkpoint has stacked find no place and are made up at random. What vLLM
    does not load is in ``vllm_reads.py``; what llama.cpp does not have, a tokenizer for one, in ``gguf_model.py``.

    Args:
        model: float, or a skeleton.
        config: how it will be quantized.
        format, program: as ``config_for``.
        source: the folder that the model comes from.

    Raises:
        ConfigError: such experts; the message names what reads them. A model type that GGUF is not written for.
        ModelError: a network or tokenizer that llama.cpp does not have, or caches that onnxruntime-genai has not.
    """
    if format in SIDES and not (FORMATS[format].mode is not None and has_one_scale(config)):
        check_layers(model, config, format)
    if format == "gguf":
        check_before(model.config, Path(source))
    if format == "onnx":
        check_runs(model)
    if format == MODE:
        check_stacks(model, config)
    if program == "vllm":
        check_for_vllm(model, config, format)
    if (format, program) == ("quark", "transformers") and is_inside_attention(config):
        raise ConfigError(
            "transformers does not load caches that are quantized behind RoPE (as those are whose keys and values one "
            "layer makes), nor attention probabilities, in the quark format; leave out --kv-cache, or try --format "
            "compressed-tensors"
        )
    if format == "compressed-tensors" and program != "vllm":
        check_stacked(model, config, source)
    if format == "compressed-tensors":
        check_compressed(model, config, program)


def check_stacked(model: nn.Module, config: QConfig, source: Path) -> None:
    """Experts that transformers stacks in float, or has no place for."""
    found = (name for name, one in model.named_modules() if is_fused(one) or isinstance(one, UnfusedExperts))
    path = next(found, None)
    if path is None:
        return
    stacked = any(STACKED.search(key) for key in read_checkpoint(source).names)
    if config.global_quant_config.input_tensors is not None or stacked:
        what = "makes stacked experts up at random" if stacked else "leaves the inputs of experts in float"
        raise ConfigError(
            f"transformers {what} when it reads {path!r} in compressed-tensors; use --format quark, or --for vllm"
        )


def check_layers(model: nn.Module, config: QConfig, format: str) -> None:
    """Refuse, before any work, layers of another kind than the format has, or of other sizes.

    Raises:
        ConfigError: one that is not linear would be quantized, or words would be left half empty.
    """
    for item in match(model, config, skeleton=True).quantized:
        layer, weight = item.layer.module, item.stages["weight"]
        if not weight:
            continue
        if not isinstance(layer, nn.Linear):
            what = f"it is a {type(layer).__name__}, and only linear layers can be"
            raise ConfigError(f"{format} cannot hold {item.layer.name!r}: {what}")
        check_blocks(item.layer.name, weight, layer.in_features, format)
        if SIDES[format]:
            lengths = {"outputs": layer.out_features, "inputs": layer.in_features}
            sides = {side: lengths[side] for side in SIDES[format]}
            check_words(f"{item.layer.name}.weight", as_a(Int, weight[0].format).bits, sides)


def config_for(config: QConfig, format: str, program: str | None, dtype: torch.dtype) -> QConfig:
    """``config`` as the readers of a format compute: with their scales, and caches quantized where they quantize them.

    Args:
        config: of a model.
        format: a name of ``FORMATS``.
        program: that will read it, if it is known.
        dtype: that the model computes in.
    """
    if config.kv_cache_quant_config and quantizes_behind_rope(format, program):
        config = replace(config, kv_cache_post_rope=True)
    if program == "vllm":  # one scale for the inputs of all experts, the largest (QuarkW8A8Fp8MoEMethod)
        config = replace(config, sync_moe_expert_input_amax=True)
    if (
        format in CAST
    ):  # transformers holds all scales of compressed-tensors in the model's type, vLLM those of integers
        everything = format == "compressed-tensors" and program != "vllm"
        return with_scales_in(config, CAST[format] or dtype, everything)
    return with_scales_in(config, dtype) if (format, program) == ("quark", "vllm") else config
