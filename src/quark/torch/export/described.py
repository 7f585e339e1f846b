"""What ``config.json`` says about a quantization, in the names that the tensors have outside.

    exclude              every layer whose matrix stays float, routers and convolutions too: programs that build
                         quantized layers by default ask for the scales of each layer that is not listed
    layer_quant_config   names outside beside the patterns that only fit names in memory; stacks of experts; and the
                         layers that make keys and values, with what is cached as ``output_tensors``
    export               ``kv_cache_group``: these layers, where their scales are static

Names in memory are listed beside those outside where they differ, since transformers matches modules by them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any

from torch import nn

from quark.torch.config.model import QConfig, QLayerConfig
from quark.torch.config.type import Dtype, QSchemeType
from quark.torch.experts import UnfusedExperts, is_fused
from quark.torch.export.config.config import JsonExporterConfig
from quark.torch.export.left_out import left_out_layers
from quark.torch.export.original import FileNames
from quark.torch.kv_cache import role_of
from quark.torch.matching import Candidate, candidate, choose, find_candidates
from quark.torch.patterns import matches
from quark.torch.template_reading import towers


def described(
    config: QConfig, export: JsonExporterConfig, model: nn.Module, names: FileNames, quantized: Collection[str]
) -> dict[str, Any]:
    """The ``quantization_config`` of ``config.json``.

    Args:
        config: with the names of all layers that stay float.
        export: how tensors are stored.
        model: quantized, or its skeleton.
        names: of its tensors outside.
        quantized: names in memory of the layers whose weight is quantized.
    """
    layers = told_layers(config, model, names)
    made = replace(config, exclude=excluded(config, model, names, quantized), layer_quant_config=layers)
    told = replace(export, kv_cache_group=cache_group(config) or export.kv_cache_group)
    return as_it_is(made, told)


def as_it_is(config: QConfig, export: JsonExporterConfig) -> dict[str, Any]:
    """The same of a model whose names in files are those in memory."""
    return {**config.to_dict(), "quant_method": "quark", "export": export.to_dict()}


def excluded(config: QConfig, model: nn.Module, names: FileNames, quantized: Collection[str]) -> list[str]:
    """What stays float, by its names outside and in memory."""
    floats = [*float_layers(model, quantized)]
    outside = [*(names.layer(name) for name in floats), *stacked_modules(model, names)]
    outside += float_towers(model, names, quantized)
    return list(dict.fromkeys([*outside, *floats, *config.exclude, *left_out_layers(model)]))


def float_towers(model: nn.Module, names: FileNames, quantized: Collection[str]) -> Iterator[str]:
    """What lies beside a language model, and is float as a whole, as regular expressions of vLLM.

    It puts query, key and value of a tower together, and for some models (PaddleOCRVLForConditionalGeneration) has no
    table that says of what: a name that nobody excluded is quantized for it.
    """
    known = [*quantized, *(names.layer(name) for name in quantized)]
    for glob in towers(model):
        if glob.endswith(".*"):
            pattern = rf"(.*\.)?{re.escape(glob[:-2].rpartition('.')[2])}\..+"
            if not any(re.fullmatch(pattern, name) for name in known):
                yield f"re:{pattern}"


def float_layers(model: nn.Module, quantized: Collection[str]) -> Iterator[str]:
    """Names in memory of the layers with a float matrix that programs may take for quantized ones."""
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() > 1 and name not in quantized and not isinstance(module, nn.Embedding):
            yield name


def stacked_modules(model: nn.Module, names: FileNames) -> Iterator[str]:
    """Everything outside of the modules whose experts stay stacked, and float."""
    for path, module in model.named_modules():
        if is_fused(module):
            form = {f"{path}.{name}": (tuple(x.shape), x.dtype) for name, x in module.named_parameters()}
            parts = [name.split(".") for name in names.written(form)]
            shared = [same[0] for same in takewhile(lambda same: len(set(same)) == 1, zip(*parts, strict=False))]
            yield ".".join([*shared, "*"])


def told_layers(config: QConfig, model: nn.Module, names: FileNames) -> dict[str, QLayerConfig]:
    """``layer_quant_config`` as a file has it; the outputs of layers that make keys and values are what is cached."""
    found = {**outside_layers(config, model, names), **cached_layers(config, model, names)}
    if not tells_caches(config):
        return found
    caches = {name: cache_named(name, config) for name in found}
    return {
        name: one if (cache := caches[name]) is None else replace(one, output_tensors=cache.output_tensors)
        for name, one in found.items()
    }


def outside_layers(config: QConfig, model: nn.Module, names: FileNames) -> dict[str, QLayerConfig]:
    """``layer_quant_config``; before a pattern, the names outside of the layers that it does not fit outside."""
    if not config.layer_quant_config:
        return {}
    found: dict[str, QLayerConfig] = {}
    layers = list(find_candidates(model))
    for pattern, value in config.layer_quant_config.items():
        for layer in layers:
            if matches(layer.names, pattern) and choose(layer, config)[0] is value:
                outside = named(names.layer(layer.name))
                found |= {} if matches(outside.names, pattern) else {outside.name: value}
        found[pattern] = value
    return {**stack_layers(config, model, names, layers, found), **found}


def stack_layers(
    config: QConfig, model: nn.Module, names: FileNames, layers: Iterable[Candidate], found: Mapping[str, QLayerConfig]
) -> dict[str, QLayerConfig]:
    """The entries of stacked experts that programs ask for by the name of the stack, which no entry fits that fits all
    of their layers ('*.experts.*')."""
    made = {}
    for path, module in model.named_modules():
        if not isinstance(module, UnfusedExperts):
            continue
        own = [choose(layer, config)[0] for layer in layers if layer.name.startswith(f"{path}.")]
        outside = stack_outside(path, names)
        known = next((value for key, value in found.items() if fnmatchcase(outside, key)), config.global_quant_config)
        if own and own[0] is not None and all(one is own[0] for one in own) and own[0] is not known:
            made[f"{outside}*"] = own[0]
    return made


def stack_outside(path: str, names: FileNames) -> str:
    """The name outside of stacked experts, of which the layers of each are outside."""
    return names.layer(f"{path}.0.down_proj").rpartition(".")[0].rpartition(".")[0]


def cached_layers(config: QConfig, model: nn.Module, names: FileNames) -> dict[str, QLayerConfig]:
    """The layers that make keys and values, by the patterns of the caches; by their own names, where one pattern fits
    layers of several schemes."""
    found: dict[str, QLayerConfig] = {}
    layers: Iterable[Candidate] = list(find_candidates(model)) if config.kv_cache_quant_config else ()
    for pattern in config.kv_cache_quant_config if tells_caches(config) else ():
        own = {names.layer(one.name): choose(one, config)[0] for one in layers if matches(one.names, pattern)}
        first = next(iter(own.values()), None)
        alike = all(one == first for one in own.values())
        made = {pattern: config.layer_quant_config.get(pattern) or first} if alike else own
        found |= {name: one or config.global_quant_config for name, one in made.items()}
    return found


def cache_named(name: str, config: QConfig) -> QLayerConfig | None:
    """The cache of the layers that an entry of ``layer_quant_config`` is called after."""
    fits = (one for pattern, one in config.kv_cache_quant_config.items() if fnmatchcase(name, pattern))
    return next(fits, None)


def tells_caches(config: QConfig) -> bool:
    """Whether the words of programs, who know layers that make keys or values, say what is cached."""
    turned = any(getattr(algorithm, "r3", False) for algorithm in config.algo_config or ())
    fused = any(len(role_of(pattern.replace("*", ""))) > 1 for pattern in config.kv_cache_quant_config)
    return not (config.kv_cache_post_rope and (turned or fused))


def without_cached(config: QConfig) -> QConfig:
    """The configuration that a file was written by: without the entries that ``cached_layers`` has added, where they
    say nothing else than all layers and the cache do; caches are no outputs of layers."""
    whole, layers, caches = config.global_quant_config, config.layer_quant_config, config.kv_cache_quant_config
    said = {name: replace(whole, output_tensors=one.output_tensors) for name, one in caches.items()}
    kept = {name: one for name, one in layers.items() if one != said.get(name)}
    named = {name: cache_named(name, config) for name in kept}
    kept = {name: one if named[name] is None else replace(one, output_tensors=None) for name, one in kept.items()}
    return replace(config, layer_quant_config=kept)


def cache_group(config: QConfig) -> list[str]:
    """The patterns of keys and values whose scales are static and of FP8, which is what programs have kernels for."""
    if not tells_caches(config):
        return []
    caches = [layer.output_tensors for layer in config.kv_cache_quant_config.values()]
    known = all(
        not isinstance(one, list) and one is not None and not one.is_dynamic and one.dtype is Dtype.fp8_e4m3
        and one.qscheme is QSchemeType.per_tensor
        for one in caches
    )  # fmt: skip
    return list(config.kv_cache_quant_config) if known else []


def named(name: str) -> Candidate:
    """A layer of which only the name is known."""
    layer = nn.Linear(1, 1, device="meta")
    return candidate(name, layer)
