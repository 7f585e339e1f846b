"""What vLLM 0.33 does not load of models whose scheme it has: experts by their layout, layers that it builds in float
or whose rows it puts in another order; and the names that it keeps.

Many of its classes take ``k_proj.output_scale``, the scale of a cache in the quark format, for a part of ``qkv_proj``
and find no place for it: their own renaming comes first. Every class finds ``<attention>.k_scale``, which files for
vLLM have instead; ``tests/consumers/vllm_caches.py`` asks vLLM's registry.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from quark.errors import ConfigError
from quark.numerics.elements import Float, Int
from quark.numerics.formats import Format
from quark.numerics.granularity import Block2D, Tensor
from quark.torch.config.model import QConfig, QLayerConfig
from quark.torch.config.tensor import QTensorConfig
from quark.torch.config.type import Dtype, QSchemeType
from quark.torch.export.described import cache_group
from quark.torch.export.gptqmodel_reads import METHODS
from quark.torch.export.original import names_of, renamed_item
from quark.torch.export.reader_scales import tensor_with, with_layers
from quark.torch.export.shards import Item
from quark.torch.export.widths import READ_AS_ONE, check_filled, check_height
from quark.torch.kv_cache import is_cached, role_of
from quark.torch.matching import choose_all, find_candidates
from quark.torch.patterns import Usual

log = logging.getLogger(__name__)

#: Layers of state-space models whose class in vLLM is handed no configuration of a quantization: they are float.
SCANNED = ("in_proj", "x_proj", "dt_proj", "out_proj")
#: Classes that put the rows of a layer in another order while they load it, as if all of its tensors were weights.
REPACKED = {"BloomForCausalLM": ("query_key_value", "BloomModel._repack_qkv")}
#: Classes that turn the rows of queries and keys while they load them: weights with a row per output, and their scales.
TURNED = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")
#: Classes that find no place for the scales of a cache, and where they lose them.
CACHELESS = {"JambaForCausalLM": "its hf_to_vllm_mapper drops '.self_attn' from names"}
FUSED = (  # such layers, as files have them
    *("qkv_proj", "gate_up_proj", "query_key_value", "qkv", "wqkv", "Wqkv", "c_attn", "Wi", "input_linear"),
    *("in_proj", "in_proj_qkvz", "in_proj_ba"),
)
#: Scales of caches in a file, and their names for vLLM; it adds ``.attn`` where a name does not have it.
CACHE_SCALES = (
    (re.compile(r"\.([kv])_proj\.output_scale$"), r".\1_scale"),
    (re.compile(r"\.attn\.([kv]_scale)$"), r".attn.attn.\1"),
)


def check_for_vllm(model: nn.Module, config: QConfig, format: str) -> None:
    """Refuse, before any work, what vLLM does not load.

    Args:
        model: float, or a skeleton.
        config: how it will be quantized.
        format: that it will be written in.

    Raises:
        ConfigError: layers, experts or caches of a kind; the message names the class or error of vLLM, and a way.
    """
    check_float_layers(model, config)
    if format == "quark":
        check_words(model, config)
    if type(model).__name__ in TURNED:
        check_turned(model, config, format)
    check_cache_scales(model, config, format)


def read_by_vllm(config: QConfig, dtype: torch.dtype) -> QConfig:
    """``config`` with the scales that vLLM computes with where it reads several layers as one, in a model of ``dtype``.

    Inputs of all experts have the largest scale (QuarkW8A8Fp8MoEMethod). FP8 weights of one scale that were not written
    with the same one are quantized once more, with the largest (requantize_with_max_scale): so they share it here.
    Integers of one scale get one per output instead (convert_to_channelwise), which changes nothing. What kernels
    compute themselves: ``as_computed``.
    """
    groups: list[list[str]] = [[Usual(name) for name in one] for one in READ_AS_ONE] if is_rounded(config) else []
    config = with_layers(with_inputs_of_fused(config, dtype), as_computed)
    return replace(config, sync_moe_expert_input_amax=True, shared_scale_groups=[*config.shared_scale_groups, *groups])


def as_computed(layer: QLayerConfig) -> QLayerConfig:
    """One layer's configuration with what kernels compute themselves, as they do.

    Scales of int4 beside FP8 inputs become FP8 under a factor per output (CutlassW4A8LinearKernel), and int8 inputs
    with a scale per token use the codes -127..127 (dynamic_scaled_int8_quant, per_token_quant_int8).
    """
    weight, inputs = layer.weight, layer.input_tensors
    if not (isinstance(weight, QTensorConfig) and isinstance(inputs, QTensorConfig)):
        return layer
    if inputs.dtype is Dtype.int8 and inputs.is_dynamic and inputs.symmetric and inputs.narrow is None:
        return replace(layer, input_tensors=replace(inputs, narrow=True))
    kinds = weight.dtype, weight.qscheme, inputs.dtype
    if kinds == (Dtype.int4, QSchemeType.per_group, Dtype.fp8_e4m3) and weight.scale_rule is None:
        return replace(layer, weight=replace(weight, scale_type=None, scale_rule="e4m3_of_row"))
    return layer


def with_inputs_of_fused(config: QConfig, dtype: torch.dtype) -> QConfig:
    """``config`` with static FP8 inputs of MXFP4 weights divided by their scale in ``dtype``, that of the model, in the
    layers that vLLM makes of several: their scale has no axis there, and a division by it keeps the type of the input
    (QuarkW4A8_MXFP4_FP8.apply_weights). Elsewhere it has one, and the division is in float32, as it is for experts.
    """
    fused = {*(name for group in READ_AS_ONE for name in group), *FUSED}
    last = {name: name.rpartition(".")[2].lstrip("*") for name in config.layer_quant_config}
    layers = {
        name: divided_in(layer, dtype) if last[name] in fused else layer
        for name, layer in config.layer_quant_config.items()
    }
    usual = divided_in(config.global_quant_config, dtype)
    if usual != config.global_quant_config:
        layers |= {Usual("*.experts.*"): config.global_quant_config}
        layers |= {Usual(f"*{name}"): usual for name in sorted(fused) if f"*{name}" not in layers}
    return replace(config, layer_quant_config=layers)


def divided_in(layer: QLayerConfig, dtype: torch.dtype) -> QLayerConfig:
    """One layer's configuration with static FP8 inputs of an MXFP4 weight divided by a scale in ``dtype``."""
    weight, inputs = layer.weight, layer.input_tensors
    if not (isinstance(weight, QTensorConfig) and isinstance(inputs, QTensorConfig)) or inputs.is_dynamic:
        return layer
    known = weight.to_stage().is_block and inputs.dtype is Dtype.fp8_e4m3  # of blocks MXFP4 is all that vLLM has so
    return replace(layer, input_tensors=tensor_with(inputs, dtype)) if known else layer


def is_rounded(config: QConfig) -> bool:
    """Whether there are FP8 weights of one scale per tensor, which vLLM rounds again where it reads several as one."""
    every = [config.global_quant_config, *config.layer_quant_config.values(), *config.layer_type_quant_config.values()]
    stages = [stage for layer in every for stage in layer.stages("weight")]
    return any(isinstance(one.spec.granularity, Tensor) and is_fp8(one.spec.row) for one in stages)


def is_fp8(row: Format) -> bool:
    """Whether it is a float type of torch with 8 bits; vLLM reads no other one, and none of a user's own."""
    return isinstance(row, Float) and row.bits == 8 and row.torch_dtype is not None


def is_shared(names: set[str], config: QConfig) -> bool:
    """Whether one group of shared scales holds layers of all these names."""
    groups = [[glob.rpartition(".")[2] for glob in group] for group in config.shared_scale_groups]
    return any(all(any(fnmatchcase(name, glob) for glob in group) for name in names) for group in groups)


def warn_of_rounding(names: Iterable[str], config: QConfig, format: str, program: str | None) -> None:
    """Say that vLLM, which may read a file, rounds weights again whose scales are not shared, or inputs twice.

    Args:
        names: of the quantized layers.
        config: that they are quantized by.
        format: that they are written in.
        program: that will read it, if it is known.
    """
    if (program, format) == (None, "quark") and with_inputs_of_fused(config, torch.bfloat16) != config:
        log.warning(
            "quark: vLLM divides FP8 inputs of layers that it reads as one by their scale in the type of the model; "
            "with --for vllm it runs what was evaluated"
        )
    if program not in (None, "vllm") or not is_rounded(config):
        return
    layers = [name.rpartition(".") for name in names]
    for one in READ_AS_ONE:
        parents = [parent for parent, _, own in layers if own in one]
        there = {own for _, _, own in layers} & {*one}
        if len(parents) > len(set(parents)) and not is_shared(there, config):
            log.warning(
                "%s: vLLM reads %s as one layer and rounds their FP8 weights again, to the largest of their scales; "
                "with --for vllm, or shared_scale_groups in the configuration, it runs what was evaluated",
                format,
                ", ".join(one),
            )
            return


def check_float_layers(model: nn.Module, config: QConfig) -> None:
    """Layers that vLLM holds in float, or cannot put in its own order with their scales."""
    mixers = tuple(f"{path}." for path, one in model.named_modules() if is_selective_scan(one))
    last, where = REPACKED.get(type(model).__name__, ("", ""))
    for layer in find_candidates(model):
        owner, _, own = layer.name.rpartition(".")
        inside = layer.name.startswith(mixers or "\0")
        if not (inside or own == last) or choose_all(layer, config)[0] is None:
            continue
        if inside:
            what, kept = "holds in float (MambaMixer has no quant_config)", f"*.{owner.rpartition('.')[2]}.*"
        else:
            what, kept = f"packs anew, and has no way for its scales ({where})", f"*{own}"
        raise ConfigError(f"{layer.name!r} is quantized, which vLLM {what}; --exclude '{kept}' leaves it in float")


def check_words(model: nn.Module, config: QConfig) -> None:
    """Integers of which several outputs share a word: vLLM takes those that fill the last word for outputs, too."""
    for layer in find_candidates(model):
        found = choose_all(layer, config)[0]
        if found is not None:
            check_filled(layer.name, found.stages("weight"), getattr(layer.module, "out_features", 0))


def check_parts(model: nn.Module, config: QConfig) -> None:
    """Blocks of rows that two of the layers which vLLM reads as one would share; the last of a layer may be shorter.

    Experts have to be taken apart: of theirs none may.
    """
    for layer in find_candidates(model):
        found = choose_all(layer, config)[0]
        if found is not None:
            check_height(layer.name, found.stages("weight"), getattr(layer.module, "out_features", 0))


def check_turned(model: nn.Module, config: QConfig, format: str) -> None:
    """Queries and keys whose rows vLLM turns, in layouts where it turns something else, or nothing."""
    for layer in find_candidates(model):
        found = choose_all(layer, config)[0]
        if not layer.name.endswith((".q_proj", ".k_proj")) or found is None:
            continue
        specs = [stage.spec for stage in found.stages("weight")]
        narrow = any(isinstance(spec.row, Int) and spec.row.bits < 8 for spec in specs)
        what = "are packed along the outputs" if narrow and format in ("quark", *METHODS) else ""
        what = "have zero points" if any(not spec.symmetric for spec in specs) else what
        what = "have scales of blocks" if any(isinstance(spec.granularity, Block2D) for spec in specs) else what
        if what:
            raise ConfigError(
                f"vLLM turns the rows of {layer.name!r} while it loads it (permute_qk_weight_for_rotary), and not "
                f"where they {what}; --exclude '*.q_proj' --exclude '*.k_proj' leaves them in float, and --format "
                f"compressed-tensors has symmetric integers"
            )


def is_selective_scan(module: nn.Module) -> bool:
    """Whether a module is a state-space mixer of the first kind, whose steps are projected from its inputs."""
    return hasattr(module, "A_log") and all(isinstance(getattr(module, name, None), nn.Linear) for name in SCANNED)


def check_cache_scales(model: nn.Module, config: QConfig, format: str) -> None:
    """Scales of keys and values for which vLLM has no place."""
    if not config.kv_cache_quant_config:
        return
    cached = [layer.name for layer in find_candidates(model) if is_cached(layer.name, config)]
    fused = next((name for name in cached if len(role_of(name)) > 1), None)
    if fused is not None:
        raise ConfigError(
            f"vLLM has no scales for the cache of {type(model).__name__}, whose keys and values {fused!r} makes "
            f"together: it reads those of 'k_proj' and 'v_proj' (QuarkConfig.get_cache_scale_mapper); leave out "
            f"--kv-cache"
        )
    if (lost := CACHELESS.get(type(model).__name__)) is not None:
        raise ConfigError(f"vLLM has no scales for the cache of {type(model).__name__} ({lost}); leave out --kv-cache")
    if format == "quark" and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ConfigError(
            f"vLLM does not read the cache of {type(model).__name__} in the quark format: attention across encoder and "
            f"decoder has no scales (QuarkConfig: quantization method of kv_cache is different); leave out --kv-cache"
        )
    if format == "quark" and config.kv_cache_per_head:
        raise ConfigError(
            "vLLM does not read caches with a scale per head (kv_cache_per_head) in the quark format "
            "(NotImplementedError: Only support per-tensor scaling factor for quark KV cache, QuarkKVCacheMethod); "
            "--format compressed-tensors has them"
        )
    if format == "quark" and not cache_group(config):
        raise ConfigError(
            f"vLLM reads caches of {Dtype.fp8_e4m3.name} with one static scale each in the quark format (QuarkConfig."
            f"from_config), and this one is another; --kv-cache fp8 is read, or leave it float"
        )
    names = names_of(model)
    for name in cached:
        outside = names.layer(name)
        if format == "quark" and not cache_scale_name(f"{outside}.output_scale").endswith(("k_scale", "v_scale")):
            raise ConfigError(
                f"vLLM reads the scale of {outside!r}, which is cached, in the quark format by the names 'k_proj' and "
                f"'v_proj' alone (QuarkConfig.get_cache_scale_mapper); --format compressed-tensors has it"
            )


def cache_scales_for(program: str | None, config: QConfig, items: list[Item]) -> list[Item]:
    """Items under their names outside; for vLLM, scales of caches under those that all its classes keep."""
    if program != "vllm" or not config.kv_cache_quant_config:
        return items
    return [renamed_item(item, cache_scale_name) for item in items]


def cache_scale_name(name: str) -> str:
    """The name for vLLM of the scale of a cache; other names stay."""
    for pattern, target in CACHE_SCALES:
        name = pattern.sub(target, name)
    return name
