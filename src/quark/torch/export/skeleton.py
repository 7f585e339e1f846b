"""A float model made ready to take the tensors of a file: the layers that its configuration names become quantized.

Weights of a ``real_quantized`` file are kept as codes and decoded at each call (``QuantLayer.compact``), so the model
in memory is as small as its file; ``unpack`` decodes them once. The model may be on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn

from quark.errors import ConfigError
from quark.numerics.granularity import Channel, Tensor
from quark.torch.attention import find_targets
from quark.torch.config.model import QConfig
from quark.torch.experts import fuse_untouched, unfuse_experts
from quark.torch.export.layout import CODES, layout_of_quantizer
from quark.torch.export.stored import PREFIXES, StoredParameters, StoredScales, StoredTensor, activation_form
from quark.torch.fake_quantize import FakeQuantize, Quantizer, make_quantizer, parts
from quark.torch.fast_paths import leave_fast_paths
from quark.torch.kv_cache import CacheQuantizer
from quark.torch.layers import own_parameter
from quark.torch.matching import ACTIVATIONS, FEATURES, Candidate, Match, candidate, match
from quark.torch.quantized_layer import OWN, SLOT_NAMES, QuantLayer, attach, mark_quantized, quantized_layers
from quark.torch.recurrent import roll_untouched, unroll_recurrent
from quark.torch.softmax import SoftmaxQuantizer
from quark.torch.stage import Stages

FORMATS = ("real_quantized", "fake_quantized")
EMBEDDED = "embedding_dim"  # features of a layer that looks up rows


def map_layers(model: nn.Module, config: QConfig, pack_method: str, weight_format: str, bytes_only: bool) -> None:
    """Turn the layers of ``model`` that ``config`` names into quantized ones, whose parameters are still to be loaded.

    Args:
        model: float; its tensors may be on the meta device.
        config: what the file says.
        pack_method, weight_format: of the file.
        bytes_only: codes of FP8 are held as bytes, so that nobody takes their type for that of the model.

    Raises:
        ConfigError, ModelError: the configuration does not fit the model.
    """
    found = match(model, config, skeleton=True, stored=True)
    for item in found.quantized:
        make_ready(item, pack_method, weight_format, bytes_only)
    mark_quantized(model, config)


def make_ready(item: Match, pack_method: str, weight_format: str, bytes_only: bool) -> None:
    """Turn one layer into a quantized one; arguments as above."""
    real = weight_format == "real_quantized"
    quantizers = {slot: activation(item, slot) for slot in ACTIVATIONS}
    for slot in OWN:
        quantizers[slot] = (stored if real else static)(item, slot, pack_method)
    take_codes(item, quantizers, bytes_only)
    attach(item.layer.module, quantizers)
    item.layer.module.__dict__["compact"] = real and any(quantizers[slot] for slot in OWN)
    for slot, quantizer in quantizers.items():
        if quantizer is not None:
            quantizer.train(item.layer.module.training)
        if isinstance(quantizer, StoredParameters):
            quantizer.settle(item.layer.module, PREFIXES[slot])


def prepared(
    model: nn.Module, config: QConfig, pack_method: str, weight_format: str, bytes_only: bool = False
) -> nn.Module:
    """A float model whose layers are ready for the tensors of a file; experts that are quantized are taken apart."""
    taken_apart, recurrent = unfuse_experts(model), unroll_recurrent(model)
    map_layers(model, config, pack_method, weight_format, bytes_only)
    fuse_untouched(taken_apart)
    roll_untouched(recurrent)
    leave_fast_paths(model)
    return model


def map_attention(model: nn.Module, config: QConfig) -> None:
    """Quantize caches and probabilities inside attention, as ``config`` says; their parameters are to be loaded."""
    with ExitStack() as undo:
        find_targets(model, config).attach(undo)
        undo.pop_all()
    for module in model.modules():
        if isinstance(module, CacheQuantizer | SoftmaxQuantizer):
            for part in parts(module):
                if part.stage.calibrated:
                    fill(part, None, torch.device("cpu"))


def is_inside_attention(config: QConfig) -> bool:
    """Whether something is quantized that is not a tensor of a layer."""
    return config.softmax_quant_spec is not None or (config.kv_cache_post_rope and bool(config.kv_cache_quant_config))


def fresh(item: Match, slot: str) -> Quantizer:
    """The quantizer of one tensor, without parameters."""
    name = f"{slot} of {item.layer.name!r}"
    return make_quantizer(item.stages[slot], name, slot in OWN)


def stored(item: Match, slot: str, pack_method: str) -> Quantizer | None:
    """The quantizer of a weight or bias that is kept as codes."""
    if not item.stages[slot]:
        return None
    value: torch.Tensor = getattr(item.layer.module, slot)
    quantizer = fresh(item, slot)
    layout = layout_of_quantizer(quantizer, tuple(value.shape), pack_method)
    return StoredTensor(layout, value.dtype, value.device, partial(fresh, item, slot))


def static(item: Match, slot: str, pack_method: str) -> Quantizer | None:
    """The quantizer of a weight or bias that is kept as float values, with empty parameters."""
    if not item.stages[slot]:
        return None
    value: torch.Tensor = getattr(item.layer.module, slot)
    quantizer = fresh(item, slot)
    for part in parts(quantizer):
        if part.stage.calibrated:
            shape = () if part.stage.is_block else part.granularity.parameter_shape(tuple(value.shape))
            fill(part, shape, value.device)
    return quantizer


def activation(item: Match, slot: str) -> Quantizer | None:
    """The quantizer of an input or output, with empty static parameters."""
    if not item.stages[slot]:
        return None
    quantizer, device = fresh(item, slot), own_parameter(item.layer.module).device
    form = activation_form(quantizer, features_of(item.layer, slot, item.stages[slot]))
    if isinstance(quantizer, FakeQuantize) and not (quantizer.stage.is_block and quantizer.stage.calibrated):
        for name, (shape, dtype) in form.items():
            setattr(quantizer, name, torch.empty(shape, dtype=dtype, device=device))
        return quantizer
    return StoredScales(quantizer, form, device) if form else quantizer


def features_of(layer: Candidate, slot: str, stages: Stages) -> int:
    """Number of the channels that have static scales in an activation; 1 where none have.

    Raises:
        ConfigError: the layer does not tell it, or static scales run along another axis, whose length inputs choose.
    """
    module, kind = layer.module, layer.kind
    counted = [stage.spec.granularity for stage in stages if stage.calibrated and not stage.is_block]
    counted = [granularity for granularity in counted if not isinstance(granularity, Tensor)]
    if not counted:
        return 1
    known = next((getattr(module, name) for name in (*FEATURES[slot], EMBEDDED) if hasattr(module, name)), None)
    axis = -1 if kind.features is None else kind.features
    other = next((one for one in counted if one != Channel(axis)), None)
    if known is None or other is not None:
        raise ConfigError(
            f"{slot} of {layer.name!r}: no file holds static scales {other or counted[0]}, since their number is not "
            f"known from the layer; per tensor, or per channel (axis {axis}), it is, or with is_dynamic=True"
        )
    return int(known)


def check_activations(model: nn.Module) -> None:
    """Raise ``ConfigError`` for static scales of a quantized model whose number no file could tell."""
    for name, layer in quantized_layers(model):
        for slot in ACTIVATIONS:
            quantizer = layer._modules[SLOT_NAMES[slot]]
            if quantizer is not None:
                features_of(candidate(name, layer), slot, tuple(part.stage for part in parts(quantizer)))


def fill(part: FakeQuantize, shape: tuple[int, ...] | None, device: torch.device) -> None:
    """Empty parameters, of the types that a file has; without ``shape`` those of the file are taken as they are."""
    device, shape = (torch.device("meta"), (0,)) if shape is None else (device, shape)
    part.scale = torch.empty(shape, dtype=torch.float32, device=device)
    if part.stage.format.has_zero_point:
        dtype = torch.float32 if part.stage.real_zero else torch.int32
        part.zero_point = torch.empty(shape, dtype=dtype, device=device)


def take_codes(item: Match, quantizers: dict[str, Quantizer | None], bytes_only: bool) -> None:
    """Empty codes in the place of the weights that are kept as codes."""
    for slot in OWN:
        quantizer, module = quantizers[slot], item.layer.module
        if isinstance(quantizer, StoredTensor):
            shape, dtype = quantizer.layout.form()[CODES]
            if bytes_only and dtype.itemsize == 1:
                dtype = torch.uint8 if dtype.is_floating_point else dtype
            codes = torch.empty(shape, dtype=dtype, device=own_parameter(module, slot).device)
            del module._parameters[slot]  # behind the others: models ask the first parameter for its type
            module._parameters[slot] = nn.Parameter(codes, requires_grad=False)


def compact_layers(model: nn.Module) -> Iterator[tuple[str, QuantLayer]]:
    """(name, layer) of the layers that are kept as codes."""
    return ((name, layer) for name, layer in quantized_layers(model) if layer.compact)


def mark_loaded(model: nn.Module) -> nn.Module:
    """Say that all codes are those of a file; ``model``."""
    for _, layer in compact_layers(model):
        layer.__dict__["loaded"] = True
    return model


@torch.no_grad()
def unpack(model: nn.Module) -> nn.Module:
    """Decode the weights that are kept as codes, once and in place: more memory, no decoding at each call.

    Returns:
        ``model``, whose layers are as ``ModelQuantizer.freeze`` leaves them.
    """
    for _, layer in list(compact_layers(model)):
        for slot in OWN:
            quantizer, codes = layer._modules[f"{slot}_quantizer"], layer._parameters.get(slot)
            if isinstance(quantizer, StoredTensor) and codes is not None:
                layer._parameters[slot] = nn.Parameter(quantizer(codes), requires_grad=False)
                layer._modules[f"{slot}_quantizer"] = quantizer.quantizer(codes)
                quantizer.release()
        layer.__dict__["compact"], layer.__dict__["frozen"] = False, True
    return model
