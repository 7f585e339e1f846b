"""Quantized keys and values in the format ``compressed-tensors``: ``kv_cache_scheme``, ``k_scale`` and ``v_scale``.

    quantizers of keys and values    →    <attention>.k_scale, <attention>.v_scale
    per tensor   strategy tensor      one number each
    per head     strategy attn_head   [heads of keys and values, 1, 1]

Programs quantize what goes into the cache, behind the rotary embedding (``kv_cache_post_rope``).
Not handled: scales of their own per channel or token, and other types than FP8 and int8; they are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from inspect import signature
from typing import Any

from torch import nn

from quark.errors import ConfigError, known
from quark.numerics.elements import Int
from quark.numerics.granularity import Channel, Tensor
from quark.torch.config.model import QConfig
from quark.torch.export.model_files import float_dtype
from quark.torch.export.reader_scales import in_type_of_model
from quark.torch.export.shards import Item, item_of
from quark.torch.fake_quantize import HALVES, FakeQuantize, Quantizer, parts
from quark.torch.kv_cache import ARGUMENTS, cache_quantizers, head_size, is_cached, role_of
from quark.torch.quantized_layer import quantized_layers

OUTPUT = "output_tensors"


def caches_of(model: nn.Module, config: QConfig) -> dict[str, FakeQuantize]:
    """The quantizers of keys and values, by the names of their scales in memory.

    Raises:
        ConfigError: a type or scale that the format does not have for caches, or one layer that makes keys and values
            and was quantized before RoPE.
    """
    found = {}
    for layer, roles, quantizer in quantizers_of(model, config):
        (part,) = parts(quantizer)
        check(layer, part, config.kv_cache_per_head, len(roles))
        found[f"{layer.rpartition('.')[0]}.{roles[0]}_scale"] = part
    return found


def quantizers_of(model: nn.Module, config: QConfig) -> Iterator[tuple[str, tuple[str, ...], Quantizer]]:
    """(layer, what of keys and values, quantizer) of all caches, behind RoPE or before it."""
    for _, cache in cache_quantizers(model):
        yield from ((cache.projections[role], (role,), quantizer) for role, quantizer in cache.quantizers())
    for name, layer in quantized_layers(model):
        if layer.output_quantizer is not None and own_slots(name, config):
            yield name, role_of(name), layer.output_quantizer


def check(name: str, part: FakeQuantize, per_head: bool, roles: int = 1) -> None:
    """One static scale, or one per head, of FP8 or int8."""
    stage = part.stage
    known = stage.format.onnx_type == "FLOAT8E4M3FN" or (isinstance(stage.format, Int) and stage.format.bits == 8)
    kind = Channel if per_head else Tensor
    plain = known and stage.spec.symmetric and isinstance(part.granularity, kind) and part.scale is not None
    if not plain or roles != 1:
        raise ConfigError(
            f"compressed-tensors cannot hold the cache of {name!r}: it has static symmetric scales per tensor or "
            f"head, of fp8_e4m3 or int8, for keys and values apart (those that one layer makes are where "
            f"kv_cache_post_rope=True)"
        )


def own_slots(name: str, config: QConfig) -> set[str]:
    """The slots of a layer that the scheme of caches tells about."""
    before = config.kv_cache_quant_config and not config.kv_cache_post_rope
    return {OUTPUT} if before and is_cached(name, config) else set()


def cache_scheme(caches: Mapping[str, FakeQuantize]) -> dict[str, Any]:
    """``kv_cache_scheme``."""
    from compressed_tensors.quantization import QuantizationArgs

    kinds = {part.stage.format.name: part.stage.format for part in caches.values()}
    if len(kinds) > 1:
        raise ConfigError(f"compressed-tensors has one type for all caches, and here are {', '.join(kinds)}")
    (row,) = kinds.values()
    number = "int" if isinstance(row, Int) else "float"
    first = next(iter(caches.values()))  # all are per tensor, or all per head
    strategy = "attn_head" if isinstance(first.granularity, Channel) else "tensor"
    made = QuantizationArgs(num_bits=8, type=number, strategy=strategy, symmetric=True, dynamic=False)
    return made.model_dump(mode="json")


def cache_items(model: nn.Module, caches: Mapping[str, FakeQuantize]) -> Iterable[Item]:
    """The scales of keys and values, beside the layers that make them."""
    for name, part in caches.items():
        scale, block = known(part.scale, f"{name!r}").float(), name.rpartition(".")[0]
        scale = in_type_of_model(scale, float_dtype(model)) if part.stage.spec.scale_rule in HALVES else scale
        given = scale[:: head_size(model, block)].reshape(-1, 1, 1) if scale.dim() else scale.reshape(1)
        yield item_of(name, given)


def check_cache_places(model: nn.Module, caches: Iterable[str]) -> None:
    """transformers has a place for every scale, and a scale for every place.

    Raises:
        ConfigError: it would leave a cache float, make up a scale, or cannot count heads.
    """
    if reason := misplaced(model, set(caches)):
        raise ConfigError(
            f"transformers does not read this cache in compressed-tensors: {reason}; leave out --kv-cache "
            f"(kv_cache_quant_config)"
        )


def misplaced(model: nn.Module, written: set[str]) -> str | None:
    """Why the places that transformers has, by its library's own rules, are not those of the scales; None: they are."""
    from compressed_tensors.quantization.lifecycle.initialize import is_cached_attention_module
    from compressed_tensors.utils import get_head_dim, get_num_attn_heads, get_num_kv_heads

    if not written:
        return None
    places = [name for name, module in model.named_modules() if is_cached_attention_module(module)]
    asked = {
        f"{name}.{role}_scale": hasattr(model.get_submodule(name), f"{role}_scale") for name in places for role in "kv"
    }
    if lost := sorted(written - asked.keys()):
        return f"it has no place for {lost[0]!r}, and leaves that cache float"
    if taken := next((name for name, own in asked.items() if own), None):
        return f"it puts a scale in the place of the model's own {taken!r}, and answers otherwise"
    if lost := sorted(asked.keys() - written):
        return f"it quantizes every cache, and has no scale for {lost[0]!r}"
    if other := next(filter(None, (reader_inside(model, name) for name in places)), None):
        return f"it lets go of the cache (QuantizedKVCache.update) before {other!r} reads it too, and breaks off"
    library: Any = model
    try:
        text = library.config.get_text_config(decoder=True)
        _ = get_num_attn_heads(text), get_num_kv_heads(text), get_head_dim(text)
    except ValueError as error:
        return f"it cannot count the heads ({str(error).partition('.')[0]})"
    return None


def reader_inside(model: nn.Module, attention: str) -> str | None:
    """A part of an attention that is handed the cache beside keys and values, as an indexer is; None: there is none."""
    inside = model.get_submodule(attention).named_modules()
    found = (name for name, part in inside if name and {*ARGUMENTS} & {*signature(part.forward).parameters})
    return next((f"{attention}.{name}" for name in found), None)
