"""Quantized keys and values of an attention cache.

    before rotary embedding:  K = Q_k(x W_k)              the output quantizer of the projection
    after (post-RoPE):        K = Q_k(rope(x W_k))        on the way into the cache
                              V = Q_v(x W_v)              the same in both

``kv_cache_quant_config`` names projections by globs; ``output_tensors`` of its entries is the format. Before RoPE the
projections get output quantizers. After RoPE the attention module that holds the projection gets a ``CacheQuantizer``:
a hook hands the module a view of its cache whose ``update`` quantizes keys and values and passes them on to the cache
that the caller owns, whatever its class. So ``generate`` keeps its cache, token by token, and a forward without a cache
attends to the same quantized keys and values.

Keys and values are quantized as [batch, tokens, heads * head size], the layout of a projection's output, so one
configuration means the same before and after RoPE: ``per_channel`` with axis -1 is one scale per channel of each head,
with axis 1 (dynamic) one per token, ``per_group`` along -1 with the head size one per token and head.

After calibration ``kv_cache_group`` gives the scales of one attention module their maximum, ``kv_cache_per_head`` those
of the channels of one head, and ``min_kv_scale`` is the least of all: what is evaluated is what ``exported_scales``
hands to a file.

With R3 of QuaRot (``RotationConfig(r3=True)``) keys are turned before they are quantized and turned back behind, which
is what turned queries and keys give: q^T H^T Q(H k).

Programs that hold a quantized cache quantize what they write into it, behind RoPE; a folder for them is evaluated there
(``config_for`` of ``quark.torch.export.write_as`` sees to that on the command line).

Not handled: cross attention (encoder-decoder caches), and recurrent states.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from quark.algorithms.hadamard import rotation
from quark.dataclass import dataclass
from quark.errors import ConfigError, ModelError
from quark.numerics.granularity import Token
from quark.torch.config.cache import TOKENS
from quark.torch.config.model import QConfig
from quark.torch.fake_quantize import FakeQuantize, Quantizer, make_quantizer, parts, quantizer_at, scale_of
from quark.torch.matching import Candidate, find_candidates
from quark.torch.patterns import matches
from quark.torch.plan_rows import on_axis
from quark.torch.quantized_layer import QuantLayer
from quark.torch.stage import Stage, Stages

ARGUMENTS = (
    "past_key_values",
    "past_key_value",
    "layer_past",
    "cache",
)  # names that attention modules give their cache
HEAD_SIZES = ("head_dim", "head_size")  # attributes of attention modules
CHILD = "_cache_quantizer"
ROLES = {  # last part of a projection's name: what it makes
    "kv_": re.compile(r"qkv|kv|query_key_value|c_attn|in_proj"),
    "k": re.compile(r"^(w?k(_|$)|key)|_k(_|$|proj)"),
    "v": re.compile(r"^(w?v(_|$)|value)|_v(_|$|proj)"),
}


@dataclass(frozen=True)
class CacheMatch:
    """An attention module whose keys and values are quantized after RoPE.

    Attributes:
        name, module: the attention module.
        stages: for "k" and "v", as far as they are quantized.
        projections: for the same, the name of the layer that the configuration named.
        turned: keys are quantized in the basis of a Hadamard rotation (QuaRot's R3).
    """

    name: str
    module: nn.Module
    stages: Mapping[str, Stages]
    projections: Mapping[str, str]
    turned: bool = False

    @property
    def all_stages(self) -> list[Stage]:
        """Of keys and values."""
        return [stage for stages in self.stages.values() for stage in stages]


class CacheQuantizer(nn.Module):
    """The quantizers of the keys and values of one attention module; None stays float.

    Attributes:
        k, v: quantizers of tensors [batch, tokens, heads * head size].
        projections: for "k" and "v", the name of the layer that makes them.
        argument: the module's argument that holds its cache.
        turned: keys are turned before they are quantized, and back behind; queries would else be turned as well.
    """

    k: Quantizer | None
    v: Quantizer | None

    def __init__(self, found: CacheMatch) -> None:
        super().__init__()
        self.projections, self.argument = dict(found.projections), argument_of(found.module)
        self.turned = found.turned
        self.positional = list(inspect.signature(found.module.forward).parameters).index(self.argument)
        for role in ("k", "v"):
            self._modules[role] = quantizer_of(found, role)

    def quantizers(self) -> Iterator[tuple[str, Quantizer]]:
        """(role, quantizer) of what is quantized."""
        for role in ("k", "v"):
            quantizer = quantizer_at(self, role)
            if quantizer is not None:
                yield role, quantizer

    def quantized(self, role: str, x: torch.Tensor) -> torch.Tensor:
        """Keys or values [batch, heads, tokens, head size], quantized."""
        quantizer = self._modules[role]
        if quantizer is None:
            return x
        turn = rotation(x.shape[3]) if self.turned and role == "k" else None
        rows = (x if turn is None else turn.apply(x)).transpose(1, 2).flatten(2)
        found = quantizer(rows).unflatten(2, (x.shape[1], x.shape[3])).transpose(1, 2)
        return found if turn is None else turn.apply_transposed(found)

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before the attention module runs: its cache becomes a view that quantizes."""
        if self.positional < len(args):
            view = CacheView(self, args[self.positional])
            return (*args[: self.positional], view, *args[self.positional + 1 :]), kwargs
        name = next((one for one in ARGUMENTS if one in kwargs), self.argument)  # callers may have an older name
        return args, {**kwargs, name: CacheView(self, kwargs.get(name))}


class CacheView:
    """A cache as one attention module sees it: what is written to it is quantized first. The cache may be None."""

    def __init__(self, quantizer: CacheQuantizer, cache: Any) -> None:
        if hasattr(cache, "cross_attention_cache"):
            raise ModelError("the cache of an encoder-decoder model cannot be quantized; only decoders can")
        self.quantizer, self.cache = quantizer, cache

    def _update(self, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values, quantized, to the cache; all that it holds is returned."""
        k, v = self.quantizer.quantized("k", k), self.quantizer.quantized("v", v)
        return (k, v) if self.cache is None else self.cache.update(k, v, *args, **kwargs)

    update = _update

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the cache."""
        return 0 if self.cache is None else self.cache.get_seq_length(layer_idx)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.cache, name)


def quantizer_of(found: CacheMatch, role: str) -> Quantizer | None:
    """The quantizer of keys or values."""
    if role not in found.stages:
        return None
    return make_quantizer(tuple(map(per_token, found.stages[role])), f"{role} of {found.projections[role]!r}", False)


def per_token(stage: Stage) -> Stage:
    """A dynamic scale per index of the token axis is one per token of each sample."""
    axis = getattr(stage.spec.granularity, "axis", None)
    return on_axis(stage, Token()) if stage.spec.dynamic and not stage.is_block and axis == TOKENS else stage


def argument_of(module: nn.Module) -> str:
    """Name of the argument of an attention module that holds its cache.

    Since transformers 5.24 all caches have one name, those of recurrent layers too: keys and values go into ``update``.
    """
    known = inspect.signature(module.forward).parameters
    found = next((name for name in ARGUMENTS if name in known), "")
    if found != "cache":
        return found
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return found if code is None or "update" in code.co_names else ""


def role_of(layer: str) -> tuple[str, ...]:
    """("k",), ("v",), both for a fused projection, or nothing for another layer, by the name of the layer."""
    last = layer.rsplit(".", 1)[-1].lower()
    found = next((role for role, pattern in ROLES.items() if pattern.search(last)), "")
    return tuple(found.rstrip("_"))


def find_caches(model: nn.Module, config: QConfig) -> list[CacheMatch]:
    """The attention modules whose cache is quantized after RoPE.

    Raises:
        ConfigError: a pattern that matches a layer which makes neither keys nor values.
        ModelError: a module without a cache.
    """
    turned = any(getattr(algorithm, "r3", False) for algorithm in config.algo_config or [])
    if turned and not (config.kv_cache_post_rope and config.kv_cache_quant_config):
        raise ConfigError(
            "rotation: r3 turns keys behind the rotary embedding, on their way into a quantized cache, so it needs "
            "kv_cache_quant_config and kv_cache_post_rope=True"
        )
    check_heads(model, config)
    if not config.kv_cache_post_rope:
        return []
    if config.kv_cache_quant_config and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelError(
            f"kv_cache_post_rope: {type(model).__name__} is an encoder-decoder, whose cache cannot be quantized; only "
            f"those of decoders can"
        )
    found: dict[str, dict[str, tuple[Stages, str]]] = {}
    for layer in find_candidates(model):
        pattern = next((key for key in config.kv_cache_quant_config if matches(layer.names, key)), None)
        if pattern is not None:
            stages = config.kv_cache_quant_config[pattern].stages("output_tensors")
            found.setdefault(layer.name.rpartition(".")[0], {}).update(roles(pattern, layer, stages))
    return [replace(cache_match(model, name, by_role), turned=turned) for name, by_role in found.items()]


def check_heads(model: nn.Module, config: QConfig) -> None:
    """Where heads have scales of their own, every attention module tells how long they are."""
    for layer in find_candidates(model) if config.kv_cache_per_head else ():
        if not is_cached(layer.name, config):
            continue
        size = head_size(model, layer.name.rpartition(".")[0])
        if (rows := getattr(layer.module, "out_features", 0)) % size:
            raise ModelError(f"kv_cache_per_head: heads of {size} do not divide the {rows} outputs of {layer.name!r}")


def head_size(model: nn.Module, name: str) -> int:
    """Channels of one head of an attention module.

    Raises:
        ModelError: the module does not tell.
    """
    module = model.get_submodule(name)
    found = next((size for key in HEAD_SIZES if isinstance(size := getattr(module, key, None), int)), 0)
    if found < 1:
        raise ModelError(
            f"kv_cache_per_head: {name!r} ({type(module).__name__}) does not tell how long a head is "
            f"({' or '.join(HEAD_SIZES)}); use a scale per tensor or channel"
        )
    return found


def roles(pattern: str, layer: Candidate, stages: Stages) -> Iterable[tuple[str, tuple[Stages, str]]]:
    """What one layer makes, and how it is quantized."""
    made = role_of(layer.name)
    if not made:
        raise ConfigError(
            f"kv_cache_quant_config: {pattern!r} matches {layer.name!r}, which does not seem to make keys or values; "
            f"name the key and value projections (or the fused one), for instance '*k_proj' and '*v_proj'"
        )
    return ((role, (stages, layer.name)) for role in made)


def cache_match(model: nn.Module, name: str, by_role: Mapping[str, tuple[Stages, str]]) -> CacheMatch:
    """The attention module called ``name``, checked."""
    module = model.get_submodule(name)
    if not argument_of(module):
        raise ModelError(
            f"kv_cache_post_rope: {name!r} ({type(module).__name__}) has no argument for a cache "
            f"({', '.join(ARGUMENTS)}); quantize the outputs of its projections instead (kv_cache_post_rope=False)"
        )
    names = {role: projection for role, (_, projection) in by_role.items()}
    return CacheMatch(name, module, {role: stages for role, (stages, _) in by_role.items()}, names)


def attach_cache(found: CacheMatch) -> RemovableHandle:
    """Quantize the cache of one attention module from now on; the handle removes the hook."""
    quantizer = CacheQuantizer(found)
    quantizer.train(found.module.training)
    found.module._modules[CHILD] = quantizer
    return found.module.register_forward_pre_hook(quantizer.hook, with_kwargs=True)


def detach_cache(found: CacheMatch, handle: RemovableHandle) -> None:
    """Undo ``attach_cache``."""
    found.module._modules.pop(CHILD, None)
    handle.remove()


def cache_quantizers(model: nn.Module) -> Iterator[tuple[str, CacheQuantizer]]:
    """(name of the attention module, its quantizers) of a model quantized after RoPE."""
    for name, module in model.named_modules():
        if isinstance(module, CacheQuantizer):
            yield name.rpartition(".")[0], module


def scaled_parts(model: nn.Module, config: QConfig) -> Iterator[tuple[str, str, FakeQuantize]]:
    """(attention module, projection, quantizer) of the keys and values that have a static scale."""
    for name, quantizer in cache_quantizers(model):
        for role, own in quantizer.quantizers():
            yield from ((name, quantizer.projections[role], part) for part in parts(own) if part.scale is not None)
    if config.kv_cache_post_rope:
        return
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLayer) and layer.output_quantizer is not None and is_cached(name, config):
            block = name.rpartition(".")[0]
            yield from ((block, name, part) for part in parts(layer.output_quantizer) if part.scale is not None)


def is_cached(name: str, config: QConfig) -> bool:
    """Whether ``kv_cache_quant_config`` names a layer."""
    return any(matches((name,), pattern) for pattern in config.kv_cache_quant_config)


def without_lost(config: QConfig, lost: Collection[str], scaled: Collection[str]) -> QConfig:
    """``config`` without what names layers whose keys and values no sample reached, and none of those that one did.

    Args:
        config: of a model.
        lost, scaled: names of projections without, and with, a scale that is found in samples.
    """

    def fits(glob: str, names: Collection[str]) -> bool:
        return any(matches((name,), glob) for name in names)

    left = {glob for glob in config.kv_cache_quant_config if fits(glob, lost) and not fits(glob, scaled)}
    kept = {glob: layer for glob, layer in config.kv_cache_quant_config.items() if glob not in left}
    group = [glob for glob in config.kv_cache_group if glob not in left]
    return replace(config, kv_cache_quant_config=kept, kv_cache_group=group) if left else config


def without_unreached_outputs(config: QConfig, model: nn.Module) -> QConfig:
    """``config`` with the names of the layers whose keys and values a sample reached, before the rotary embedding, in
    the place of a glob that fits others too (attention across an encoder that a decoder alone does not have)."""
    reached: dict[bool, list[str]] = {True: [], False: []}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLayer) and layer.output_quantizer is not None and is_cached(name, config):
            lost = any(part.stage.calibrated and part.scale is None for part in parts(layer.output_quantizer))
            reached[not lost].append(name)
    if config.kv_cache_post_rope or not reached[False]:
        return config

    def spelled(glob: str) -> list[str]:
        own = [name for name in reached[True] if matches((name,), glob)]
        return own if any(matches((name,), glob) for name in reached[False]) else [glob]

    layers = {name: layer for glob, layer in config.kv_cache_quant_config.items() for name in spelled(glob)}
    group = [name for glob in config.kv_cache_group for name in spelled(glob)]
    return replace(config, kv_cache_quant_config=layers, kv_cache_group=group)


def lost_projections(model: nn.Module) -> set[str]:
    """Names of projections whose keys and values no sample reached."""
    return {
        quantizer.projections[role]
        for _, quantizer in cache_quantizers(model)
        for role, own in quantizer.quantizers()
        if any(part.stage.calibrated and part.scale is None for part in parts(own))
    }


def settle_scales(model: nn.Module, config: QConfig) -> None:
    """Merge the scales of each attention module's group, and raise all to the least allowed."""
    groups: dict[str, list[FakeQuantize]] = {}
    for block, projection, part in scaled_parts(model, config):
        if config.min_kv_scale:
            part.scale = scale_of(part).clamp(min=config.min_kv_scale)
        if config.kv_cache_per_head:
            part.scale = widest_in_heads(scale_of(part), head_size(model, block))
        if any(matches((projection,), glob) for glob in config.kv_cache_group):
            groups.setdefault(block, []).append(part)
    for members in groups.values():
        widest = torch.stack([scale_of(part) for part in members]).amax(0)
        for part in members:
            part.scale = widest.clone()


def widest_in_heads(scale: torch.Tensor, size: int) -> torch.Tensor:
    """Scales of channels [heads * size], each the largest of its head."""
    return scale.reshape(-1, size).amax(1).repeat_interleave(size)


def exported_scales(model: nn.Module) -> dict[str, torch.Tensor]:
    """Static scales of keys and values, named ``<projection>.output_scale`` as in a checkpoint.

    A fused projection after RoPE has two: ``<projection>.output_scale`` of the keys and
    ``<projection>.output_scale_2`` of the values. Empty for a model whose cache is not quantized, or dynamically.
    """
    config = getattr(model, "quant_config", None)
    scales: dict[str, torch.Tensor] = {}
    for _, projection, part in scaled_parts(model, config) if config is not None else ():
        name = f"{projection}.output_scale"
        scales[f"{name}_2" if name in scales else name] = scale_of(part)
    return scales
