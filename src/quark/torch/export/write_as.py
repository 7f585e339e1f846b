"""A quantized model written in any format by its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.config.file_formats import FORMATS, quantizes_behind_rope
from quark.errors import check_name
from quark.files.folder import new_folder
from quark.torch.calibration import on_cpu
from quark.torch.config.model import QConfig
from quark.torch.export.compressed_tensors import export_compressed_tensors
from quark.torch.export.genai import write_config
from quark.torch.export.gguf_model import export_gguf
from quark.torch.export.gguf_tensors import FileLoss
from quark.torch.export.gptqmodel_reads import METHODS
from quark.torch.export.huggingface import config_of, export_safetensors
from quark.torch.export.model_files import copy_beside
from quark.torch.export.onnx_model import FILE, export_onnx
from quark.torch.export.reader_scales import with_scales_in
from quark.torch.export.shards import SHARD_SIZE
from quark.torch.export.transformers_reads import check_custom, check_wide_layers
from quark.torch.export.vllm_reads import read_by_vllm
from quark.torch.quantized_layer import quantized_layers


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
    if program == "transformers":
        check_custom(model, [name for name, _ in quantized_layers(model)], config_of(model), format)
        if format != "quark":
            check_wide_layers(model)
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
    with on_cpu(model):  # where the example lies, and ONNX Runtime runs the file
        export_onnx(model, folder, torch.zeros(1, 1, dtype=torch.int64), use_cache=True, verify=verify)
    with new_folder(folder, beside=True) as draft:
        write_config(model, draft, folder / FILE)
        copy_beside(model, draft)


WRITERS: Mapping[str, Callable[[nn.Module, Path, Path, bool], FileLoss | None]] = {"gguf": to_gguf, "onnx": to_onnx}
CAST = ("compressed-tensors", *METHODS, "gguf")  # formats whose readers hold the scales of integers in a half type


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
    if program == "vllm":
        config = read_by_vllm(config, dtype)
    if format in CAST:
        # transformers holds all scales of compressed-tensors in the model's type, vLLM those of integers
        everything = format == "compressed-tensors" and program != "vllm"
        return with_scales_in(config, scales_in(format, program, dtype), everything)
    return with_scales_in(config, dtype) if (format, program) == ("quark", "vllm") else config


def scales_in(format: str, program: str | None, dtype: torch.dtype) -> torch.dtype:
    """The type in which the readers of a format of ``CAST`` hold scales, of a model that computes in ``dtype``.

    gptqmodel, which transformers reads AWQ and GPTQ with, has float16 whatever the model computes in, and vLLM runs
    models of float32 in float16.
    """
    half = format in METHODS and (program == "transformers" or dtype is torch.float32)
    return torch.float16 if half or format == "gguf" else dtype
