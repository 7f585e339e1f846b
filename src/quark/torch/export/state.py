"""The tensors of a quantized model under the names of a checkpoint, as items that are made when they are written.

<layer>.weight, <layer>.bias                    codes (real_quantized) or float values (fake_quantized)
<layer>.weight_scale, weight_zero_point, ..     their parameters; ``_2`` of later stages
<layer>.input_scale, <layer>.output_scale, ..   static activations; static keys and values of an attention cache
everything else                                 as it is; tensors shared under several names once
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from quark.dataclass import dataclass
from quark.errors import ModelError, known
from quark.torch.export.extras import extra_items
from quark.torch.export.layout import CODES, Stored, layout_of_quantizer, store
from quark.torch.export.shards import Item, item_of
from quark.torch.export.stored import PREFIXES, StoredParameters, StoredTensor, activation_name, stored_activation
from quark.torch.fake_quantize import FakeQuantize, Quantizer, parts
from quark.torch.kv_cache import CacheQuantizer, cache_quantizers
from quark.torch.layers import name_in, own_parameter
from quark.torch.quantized_layer import OWN, SLOT_NAMES, QuantLayer, quantized_layers
from quark.torch.softmax import SoftmaxQuantizer

ACTIVATIONS = ("input_tensors", "output_tensors")


def items_of(model: nn.Module, pack_method: str, weight_format: str) -> list[Item]:
    """All tensors of ``model``.

    Args:
        model: quantized; it is not changed.
        pack_method: "reorder" or "order".
        weight_format: "real_quantized" or "fake_quantized".
    """
    layers = dict(quantized_layers(model))
    items = []
    for name, value in own_tensors(model, layers):
        layer, _, slot = name.rpartition(".")
        if layer in layers and slot in OWN and layers[layer]._modules[f"{slot}_quantizer"] is not None:
            items.append(quantized_item(layers[layer], name, slot, pack_method, weight_format))
        else:
            items.append(item_of(name, value))
    items += [made for name, layer in layers.items() if (made := activations_item(name, layer)) is not None]
    return items + list(attention_items(model)) + list(extra_items(model))


def own_tensors(model: nn.Module, layers: Mapping[str, QuantLayer]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of the state, each once, without those of quantizers."""
    hidden = {name_in(name, slot) for name in names_of(model, layers) for slot in SLOT_NAMES.values()}
    hidden |= {name for name, module in model.named_modules() if isinstance(module, CacheQuantizer | SoftmaxQuantizer)}
    coded = {
        name_in(name, slot) for name, layer in layers.items() for slot in OWN if layer._modules[f"{slot}_quantizer"]
    }
    hidden |= {name_in(name, key) for name, layer in layers.items() for key in numbered_names(layer)}
    aliases = {name_in(name, slot) for name in names_of(model, layers) if name not in layers for slot in OWN}
    seen: set[tuple[object, ...]] = set()
    state, tied = model.state_dict(), tied_names(model)
    kept = model.state_dict(keep_vars=True)  # tensors without values are told apart as objects
    for name in sorted(state, key=lambda name: name in tied):
        value = state[name]
        if name in aliases or name in hidden or any(owner in hidden for owner in prefixes(name)):
            continue
        if not isinstance(value, torch.Tensor):
            raise ModelError(f"the state of the model holds {name!r}, which is not a tensor but {type(value).__name__}")
        key = ("codes", name) if name in coded else identity(kept[name])
        if key not in seen:
            seen.add(key)
            yield name, value


def numbered_names(layer: QuantLayer) -> Iterator[str]:
    """Buffers of a layer that belong to its quantizers."""
    for _, quantizer in layer.quantizers():
        if isinstance(quantizer, StoredParameters):
            yield from quantizer.numbered.values()


def names_of(model: nn.Module, layers: Mapping[str, QuantLayer]) -> Iterator[str]:
    """All names of the quantized layers, those of shared ones too."""
    wanted = {id(layer) for layer in layers.values()}
    return (name for name, module in model.named_modules(remove_duplicate=False) if id(module) in wanted)


def prefixes(name: str) -> Iterator[str]:
    """``a``, ``a.b`` of ``a.b.c``."""
    return (name[:k] for k, letter in enumerate(name) if letter == ".")


def tied_names(model: nn.Module) -> Iterable[str]:
    """Names that transformers ties to another one, which files hold."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def identity(value: torch.Tensor) -> tuple[object, ...]:
    """Equal for two views of the same values."""
    if not value.numel() or value.is_meta:
        return (id(value),)
    return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, str(value.device)


@dataclass(frozen=True)
class QuantizedParameter:
    """A weight or bias that is quantized.

    Attributes:
        name: in the file.
        value: gives the float tensor.
        quantizer: of it.
        shape, dtype: of it.
        frozen: it holds quantized values.
    """

    name: str
    value: Callable[[], torch.Tensor]
    quantizer: Quantizer
    shape: tuple[int, ...]
    dtype: torch.dtype
    frozen: bool


def quantized_item(layer: QuantLayer, name: str, slot: str, pack_method: str, weight_format: str) -> Item:
    """The weight or bias of a quantized layer."""
    quantizer, value = layer.own_quantizer(slot), own_parameter(layer, slot)
    if not isinstance(quantizer, StoredTensor):
        source = QuantizedParameter(name, lambda: value, quantizer, tuple(value.shape), value.dtype, layer.frozen)
    elif weight_format == "real_quantized" and quantizer.layout.pack_method == pack_method:
        form = quantizer.layout.form()
        codes = value.detach().view(form[CODES][1])  # those of FP8 may be held as bytes
        held = {named(name, key): entry for key, entry in form.items()}
        return Item(held, lambda: renamed(name, {**quantizer.stored, CODES: codes}))
    else:
        again = quantizer.quantizer(value)
        source = QuantizedParameter(
            name, lambda: quantizer(value), again, quantizer.layout.shape, quantizer.dtype, True
        )
    return real_item(source, pack_method) if weight_format == "real_quantized" else fake_item(source)


def real_item(source: QuantizedParameter, pack_method: str) -> Item:
    """Codes and their parameters."""
    form = layout_of_quantizer(source.quantizer, source.shape, pack_method).form()
    return Item(
        {named(source.name, key): entry for key, entry in form.items()},
        lambda: renamed(source.name, store(source.value(), source.quantizer, pack_method, source.frozen)),
    )


def fake_item(source: QuantizedParameter) -> Item:
    """Float values, and the static parameters that quantize them."""
    kept: Stored = {}
    for number, part in enumerate(parts(source.quantizer), 1):
        for kind in ("scale", "zero_point"):
            value = getattr(part, kind)
            if value is not None and part.stage.calibrated and (kind == "scale" or part.stage.format.has_zero_point):
                kept[activation_name(part, kind, number)] = value
    form = {named(source.name, key): (tuple(value.shape), value.dtype) for key, value in kept.items()}
    return Item(
        {source.name: (source.shape, source.dtype), **form},
        lambda: renamed(source.name, {CODES: source.value().detach(), **kept}),
    )


def activations_item(name: str, layer: QuantLayer) -> Item | None:
    """The static parameters of a layer's input and output."""
    made: Stored = {}
    for slot, quantizer in layer.quantizers():
        if slot in ACTIVATIONS:
            made.update(renamed(name_in(name, PREFIXES[slot]), stored_activation(quantizer)))
    return given_item(made)


def attention_items(model: nn.Module) -> Iterator[Item]:
    """The static parameters of caches after RoPE, and of attention probabilities."""
    made = {name: getattr(part, kind) for name, part, kind in attention_parameters(model)}
    if (item := given_item({name: value for name, value in made.items() if value is not None})) is not None:
        yield item


def attention_parameters(model: nn.Module) -> Iterator[tuple[str, FakeQuantize, str]]:
    """(name in a file, quantizer, buffer) of keys and values that are quantized after RoPE, and of probabilities.

    A fused projection makes keys and values: then the parameters of the values have the suffix ``_2``.
    """
    for _, cache in cache_quantizers(model):
        fused = len(set(cache.projections.values())) < len(cache.projections)
        for role, projection in cache.projections.items():
            suffix = "_2" if fused and role == "v" else ""
            for part in parts(known(cache._modules[role], role)):
                yield from named_parameters(f"{projection}.output", part, suffix)
    for name, module in model.named_modules():
        if isinstance(module, SoftmaxQuantizer):
            yield from named_parameters(f"{name.rpartition('.')[0]}.prob_output", module.probabilities, "")


def named_parameters(prefix: str, part: FakeQuantize, suffix: str) -> Iterator[tuple[str, FakeQuantize, str]]:
    """The static parameters of one quantizer."""
    if part.stage.calibrated:
        yield f"{prefix}_scale{suffix}", part, "scale"
        if part.stage.format.has_zero_point:
            yield f"{prefix}_zero_point{suffix}", part, "zero_point"


def given_item(made: Stored) -> Item | None:
    """An item of tensors that are there already."""
    if not made:
        return None
    return Item({name: (tuple(value.shape), value.dtype) for name, value in made.items()}, lambda: made)


def named(name: str, suffix: str) -> str:
    """The name of a stored tensor."""
    return f"{name}_{suffix}" if suffix else name


def renamed(name: str, stored: Mapping[str, torch.Tensor]) -> Stored:
    """Stored tensors under their full names."""
    return {named(name, key): value for key, value in stored.items()}
