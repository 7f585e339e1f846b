"""Quantized keys and values in the format ``compressed-tensors``: ``kv_cache_scheme``, ``k_scale`` and ``v_scale``.

    k_proj.output_quantizer, v_proj.output_quantizer    →    <attention>.k_scale, <attention>.v_scale
    per tensor   strategy tensor      one number each
    per head     strategy attn_head   [heads of keys and values, 1, 1]

Programs quantize what goes into the cache, behind the rotary embedding; the scales were calibrated before it.
Not handled: scales of their own per channel or token, and other types than FP8 and int8; they are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from quark.errors import ConfigError, known
from quark.numerics.elements import Int
from quark.numerics.granularity import Channel, Tensor
from quark.torch.config.model import QConfig
from quark.torch.export.shards import Item, item_of
from quark.torch.export.stored import StoredScales
from quark.torch.fake_quantize import FakeQuantize, parts
from quark.torch.kv_cache import head_size, is_cached, role_of
from quark.torch.quantized_layer import quantized_layers

OUTPUT = "output_tensors"


def cached(model: nn.Module, config: QConfig) -> dict[str, FakeQuantize]:
    """The quantizers of the outputs that go to a cache, by the names of their layers.

    Raises:
        ConfigError: a type or scale that the format does not have for caches.
    """
    found = {}
    for name, layer in quantized_layers(model):
        quantizer = layer.output_quantizer
        if quantizer is not None and config.kv_cache_quant_config and is_cached(name, config):
            settled = quantizer.settled() if isinstance(quantizer, StoredScales) else quantizer
            (found[name],) = parts(settled)
            check(name, found[name], config.kv_cache_per_head)
    return found


def check(name: str, part: FakeQuantize, per_head: bool) -> None:
    """One static scale, or one per head, of FP8 or int8."""
    stage = part.stage
    known = stage.format.onnx_type == "FLOAT8E4M3FN" or (isinstance(stage.format, Int) and stage.format.bits == 8)
    kind = Channel if per_head else Tensor
    plain = known and stage.spec.symmetric and isinstance(part.granularity, kind) and part.scale is not None
    if not plain or len(role_of(name)) != 1:
        raise ConfigError(
            f"compressed-tensors cannot hold the cache of {name!r}: it has static symmetric scales per tensor or "
            f"head, of fp8_e4m3 or int8, for keys and values that layers of their own make"
        )


def own_slots(name: str, caches: Mapping[str, FakeQuantize]) -> set[str]:
    """The slots of a layer that the scheme of caches tells about."""
    return {OUTPUT} if name in caches else set()


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
        scale, block = known(part.scale, f"the scale of {name!r}").float(), name.rpartition(".")[0]
        given = scale[:: head_size(model, block)].reshape(-1, 1, 1) if scale.dim() else scale.reshape(1)
        yield item_of(f"{block}.{role_of(name)[0]}_scale", given)
