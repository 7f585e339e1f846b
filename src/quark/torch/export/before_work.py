"""What a format, or the program that reads it, cannot hold is refused before any work.

Each format says so itself, and is asked here by model and configuration; a skeleton is enough: no weight is looked at.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from torch import nn

from quark.config.file_formats import FORMATS, PROGRAMS
from quark.errors import ConfigError
from quark.numerics.formats import BUILT_IN
from quark.numerics.formats import FORMATS as ROWS
from quark.torch.config.model import SLOTS, QConfig
from quark.torch.experts import UnfusedExperts, is_fused, unfuse_experts
from quark.torch.export import compressed_tensors, gguf_model
from quark.torch.export.checkpoint import read_checkpoint
from quark.torch.export.custom_modes import CUSTOM_MODES, custom_config, has_one_scale
from quark.torch.export.genai import check_runs
from quark.torch.export.gguf_in_transformers import check_gguf
from quark.torch.export.in_turn import check_in_turn
from quark.torch.export.model_files import check_merged
from quark.torch.export.skeleton import features_of, is_inside_attention
from quark.torch.export.stacked_blocks import MODE, check_stacks
from quark.torch.export.transformers_reads import check_custom, check_wide, without_values
from quark.torch.export.vllm_reads import check_for_vllm, check_parts
from quark.torch.export.vllm_schemes import check_schemes
from quark.torch.export.widths import SIDES, check_widths
from quark.torch.matching import ACTIVATIONS, match
from quark.torch.recurrent import unroll_recurrent
from quark.torch.rotated import refuse_algorithms

#: A tensor of stacked experts in a checkpoint: no module of its own, and so no ``.weight``.
STACKED = re.compile(r"experts\.(gate_up_proj|up_proj|down_proj)(_blocks)?$")


def check_before_work(
    model: nn.Module, config: QConfig, format: str, program: str | None, source: str | os.PathLike[str]
) -> None:
    """Refuse what the format cannot hold, or the program would read wrongly.

    What vLLM does not load is in ``vllm_reads.py``, what transformers reads otherwise in ``transformers_reads.py``,
    what llama.cpp does not have, a tokenizer for one, in ``gguf_model.py``, what ONNX has no nodes for in
    ``onnx_says.py``.

    Args:
        model: float, or a skeleton; it stays as it is.
        config: how it will be quantized.
        format, program: as ``config_for``.
        source: the folder that the model comes from.

    Raises:
        ConfigError: such a layer, cache, scheme or algorithm; the message names it, and what holds it.
        ModelError: a network or tokenizer that llama.cpp does not have, caches that onnxruntime-genai has not, or
            adapters that are not merged.
    """
    if format != "onnx":  # whose graph holds layers around others
        check_merged(model)
    holder = PROGRAMS[program].title if format == "quark" and program else f"the {FORMATS[format].title} format"
    if format != "quark" or program:
        refuse_algorithms(config, holder)
    if program is not None and format != "onnx":  # whose files hold what a format of a user's own means
        check_built_in(config, program)
    if program == "vllm":
        bare = apart(model)
        check_schemes(bare, config, format)
        check_for_vllm(model, config, format)
        check_parts(bare, config)
        if format == "quark":
            check_in_turn(bare, config)
    if (format, program) == ("quark", "transformers") and is_inside_attention(config):
        raise ConfigError(
            "transformers does not load caches that are quantized behind RoPE (as those are whose keys and values one "
            "layer makes), nor attention probabilities, in the quark format; leave out --kv-cache, or try --format "
            "compressed-tensors"
        )
    if format == "compressed-tensors" and program != "vllm":
        check_stacked(model, config, Path(source))
    if (format != "quark" and program == "transformers") or (format == "compressed-tensors" and program is None):
        found = match(apart(model), config, skeleton=True).quantized
        check_wide(model, ((one.layer.name, one.stages["weight"], bool(one.stages["input_tensors"])) for one in found))
    check_format(model, config, format, program, Path(source))


def check_built_in(config: QConfig, program: str) -> None:
    """No other program has a word for a format of a user's own."""
    layers = (config.global_quant_config, *config.layer_quant_config.values(), *config.layer_type_quant_config.values())
    layers = (*layers, *config.kv_cache_quant_config.values())
    names = {stage.spec.format for layer in layers for slot in SLOTS for stage in layer.stages(slot)}
    own = sorted(names & set(ROWS) - BUILT_IN)
    if own:
        raise ConfigError(
            f"{PROGRAMS[program].title} does not read a format of your own such as {own[0]}; leave out --for, or write "
            f"--format onnx, which any ONNX runtime runs"
        )


def check_format(model: nn.Module, config: QConfig, format: str, program: str | None, source: Path) -> None:
    """What the format itself says."""
    if format == "onnx":
        check_runs(model)
    if format in CUSTOM_MODES:
        custom_config(config, format, {}, ())
    bare = apart(model)
    if format in SIDES and not (FORMATS[format].mode is not None and has_one_scale(config)):
        check_layers(bare, config, format)
    if format == "gguf":
        gguf_model.check_before(bare, config, source)
        if program == "transformers":
            check_gguf(model)
    elif format == "onnx":
        from quark.torch.export import onnx_says  # which imports onnx

        onnx_says.check_before(bare, config)
    elif format == "compressed-tensors":
        compressed_tensors.check_before(model, config, program)
    else:
        found = match(bare, config, skeleton=True).quantized
        for item in found:
            for slot in ACTIVATIONS:
                features_of(item.layer, slot, item.stages[slot])
        if program == "transformers":
            check_custom(bare, [item.layer.name for item in found], config, format)
    if format == MODE:
        check_stacks(model, config)


def apart(model: nn.Module) -> nn.Module:
    """A copy without values, whose stacked experts and recurrent layers are the layers that are quantized."""
    bare = without_values(model)
    unfuse_experts(bare)
    unroll_recurrent(bare)
    return bare


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
    """Layers of another kind than the format has, or of other sizes.

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
        check_widths(item.layer.name, weight, layer.out_features, layer.in_features, format)
