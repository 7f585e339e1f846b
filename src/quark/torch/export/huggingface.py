"""``export_safetensors``: a quantized model as the folder that transformers, vLLM and our own import read.

The model is not changed. Tensors are made and written one layer at a time.
"""

from __future__ import annotations

import os
from dataclasses import replace

from torch import nn

from quark.errors import ConfigError, ModelError, check_name
from quark.files.folder import new_folder
from quark.torch.config.model import QConfig, QLayerConfig
from quark.torch.export import gptqmodel_reads, modelopt
from quark.torch.export.config.config import JsonExporterConfig
from quark.torch.export.custom_modes import CUSTOM_MODES, custom_config, custom_items, foreign
from quark.torch.export.described import described, excluded
from quark.torch.export.in_turn import checked_pairs, joined
from quark.torch.export.layout import Layout, PairLayout, layout_of_quantizer
from quark.torch.export.left_out import left_out_items
from quark.torch.export.model_files import check_merged, copy_beside, stem_of, write_config
from quark.torch.export.original import names_of, outside_items
from quark.torch.export.reader_scales import warn_of_casts, warn_of_rope, worst_cast
from quark.torch.export.shards import SHARD_SIZE, write_shards
from quark.torch.export.skeleton import FORMATS, check_activations
from quark.torch.export.state import items_of
from quark.torch.export.storage import PACK_METHODS
from quark.torch.export.stored import StoredTensor
from quark.torch.export.verify import verify as check_written
from quark.torch.export.vllm_reads import cache_scales_for, warn_of_rounding
from quark.torch.fake_quantize import parts
from quark.torch.kv_cache import lost_projections, scaled_parts, without_lost, without_unreached_outputs
from quark.torch.layers import name_in
from quark.torch.matching import candidate, choose
from quark.torch.quantized_layer import QuantLayer, is_diffusers, quantized_layers
from quark.torch.rotated import refuse_to_export

MODES = ("quark", *CUSTOM_MODES)


def export_safetensors(
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    custom_mode: str = "quark",
    weight_format: str | None = None,
    pack_method: str = "reorder",
    max_shard_size: int = SHARD_SIZE,
    verify: bool = True,
    program: str | None = None,
) -> None:
    """Write a quantized model to a folder.

    Args:
        model: from ``ModelQuantizer.quantize_model`` (frozen or not), or imported.
        output_dir: new folder, or one without a model in it.
        custom_mode: "quark"; or "fp8", "awq", "gptq", "gptq_v2", "modelopt" or "mxfp4", which other programs
            read, for configurations that they can say.
        weight_format: "real_quantized" (codes; the default, but for diffusers) or "fake_quantized" (float values).
        pack_method: order of 4-bit codes in a word: "reorder" (that of AWQ) or "order".
        max_shard_size: bytes of tensors per file; a single layer may be larger.
        verify: read every tensor back and compare it with what the model computes with, before the folder appears.
        program: that will read it, if it is known; "vllm": scales of caches have names that all its classes keep;
            "transformers": AWQ and GPTQ files say what is quantized in its names of modules.

    Raises:
        ModelError: a model that is not quantized, or a tensor that does not read back.
        ConfigError: an unknown mode or format, a mode that does not fit, a folder that holds a model.
    """
    weight_format = weight_format or ("fake_quantized" if is_diffusers(model) else "real_quantized")
    check_names(custom_mode, weight_format, pack_method)
    config = config_of(model)
    check_merged(model)
    check_activations(model)
    if custom_mode != "quark":
        refuse_to_export(model)
    export = JsonExporterConfig(weight_format, pack_method, list(config.kv_cache_group), config.min_kv_scale)
    if custom_mode != "quark" and (weight_format, pack_method) != ("real_quantized", "reorder"):
        raise ConfigError(f"custom_mode {custom_mode!r} has real_quantized weights in the order 'reorder'")
    names, coded = names_of(model), coded_layers(model)
    own = (custom_mode, weight_format) == ("quark", "real_quantized")
    pairs = checked_pairs(model, config, names) if own and program == "vllm" else {}
    if custom_mode == "quark":
        entry = described(config, export, model, names, coded)
    else:
        floats = excluded(config, model, names, coded)
        entry = custom_config(replace(config, exclude=floats), custom_mode, export.to_dict(), floats)
        entry = gptqmodel_reads.told(entry, model, coded) if program == "transformers" else entry
    items = items_of(model, pack_method, weight_format)
    warn_of_rope(config, custom_mode, program)
    warn_of_rounding(coded, config, custom_mode, program)
    if custom_mode != "quark":
        if custom_mode in gptqmodel_reads.METHODS:  # whose readers cast scales
            warn_of_casts(custom_mode, model, worst_cast(model))
        items = custom_items(model, items, coded_layouts(model, pack_method), custom_mode, config)
    items = cache_scales_for(program, config, [*outside_items(items, names), *left_out_items(model)])
    with new_folder(output_dir) as folder:
        write_shards(folder, joined(items, pairs), stem_of(model), max_shard_size)
        copy_beside(model, folder)
        write_config(model, folder, entry)
        if custom_mode == "modelopt":
            modelopt.write_beside(folder, entry)
        if verify:
            check_written(folder, model, items, names, pack_method, None if own else foreign(model, names, entry))


def check_names(custom_mode: str, weight_format: str, pack_method: str) -> None:
    """Raise ``ConfigError`` for a mode, format or order that there is not."""
    for name, value, allowed in (
        ("custom_mode", custom_mode, MODES),
        ("weight_format", weight_format, FORMATS),
        ("pack_method", pack_method, PACK_METHODS),
    ):
        check_name(name, value, allowed)


def coded_layers(model: nn.Module) -> set[str]:
    """Names of the layers whose weight is quantized."""
    return {name for name, layer in quantized_layers(model) if layer.weight_quantizer is not None}


def config_of(model: nn.Module) -> QConfig:
    """The configuration of a quantized model, with what no sample reached left float.

    Raises:
        ModelError: not quantized.
    """
    config = getattr(model, "quant_config", None)
    if not isinstance(config, QConfig):
        raise ModelError(f"{type(model).__name__} is not quantized; ModelQuantizer(config).quantize_model comes first")
    scaled = {projection for _, projection, _ in scaled_parts(model, config)}
    config = without_unreached_outputs(without_lost(config, lost_projections(model), scaled), model)
    overrides = {
        name: left for name, layer in quantized_layers(model) if (left := without_unreached(name, layer, config))
    }
    return replace(config, layer_quant_config={**config.layer_quant_config, **overrides}) if overrides else config


def without_unreached(name: str, layer: QuantLayer, config: QConfig) -> QLayerConfig | None:
    """The configuration of a layer without the static activations that no sample reached; None if all were."""
    float_slots = [
        slot
        for slot, quantizer in layer.quantizers()
        if any(part.stage.calibrated and part.scale is None for part in parts(quantizer))
    ]
    if not float_slots:
        return None
    found, _ = choose(candidate(name, layer), config)
    return replace(found, **dict.fromkeys(float_slots)) if found is not None else None


def coded_layouts(model: nn.Module, pack_method: str) -> dict[str, Layout | PairLayout]:
    """How the weights that are kept as codes are stored, by their names."""
    found: dict[str, Layout | PairLayout] = {}
    for name, layer in quantized_layers(model):
        quantizer, value = layer.weight_quantizer, layer._parameters["weight"]
        if isinstance(quantizer, StoredTensor):
            found[name_in(name, "weight")] = quantizer.layout
        elif quantizer is not None and value is not None:
            found[name_in(name, "weight")] = layout_of_quantizer(quantizer, tuple(value.shape), pack_method)
    return found
