"""``export_compressed_tensors``: checkpoints of the library compressed-tensors, which vLLM and transformers read.

Codes, scales and packing are made by the library from our values, scales and zero points, layer by layer:

    pack-quantized     int4, int8 weights only; int4 weights beside symmetric int8, int4 or FP8 activations
    int-quantized      int8 weights and activations   nvfp4-pack-quantized   NVFP4 blocks under a tensor scale
    float-quantized    FP8 E4M3 weights, with or      mxfp4-pack-quantized, mxfp6-pack-quantized (E2M3),
                       without activations            mxfp8-quantized        MX blocks

Unsigned codes become signed ones (both shifted by half the range). Scales of packed integers are written in the model's
type, which readers cast them to; where that would change them they stay float32 and a warning says so. Not handled:
other formats, two stages, layers that are not linear, outputs and biases; they are refused by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from quark.dataclass import dataclass
from quark.errors import ConfigError, as_a, known
from quark.files.folder import new_folder
from quark.numerics import granularity
from quark.numerics.affine import axis_of
from quark.numerics.blocks import Block
from quark.numerics.elements import Int
from quark.numerics.granularity import Block2D, Channel, Group, Tensor, Token
from quark.torch.config.model import QConfig
from quark.torch.export.compressed_caches import cache_items, cache_scheme, caches_of, check_cache_places, own_slots
from quark.torch.export.decoded import COMPRESSED, OWN, OWN_FIELDS, Foreign, decompressor, in_kernels, rows_cut
from quark.torch.export.described import excluded
from quark.torch.export.huggingface import config_of
from quark.torch.export.layout import CODES, BlockLayout, layout_of_quantizer, layouts_of, store
from quark.torch.export.left_out import left_out_items
from quark.torch.export.model_files import check_merged, copy_beside, write_config
from quark.torch.export.original import FileNames, names_of, outside_items
from quark.torch.export.reader_scales import in_type_of_model, moved, warn_of_casts, warn_of_rope
from quark.torch.export.shards import SHARD_SIZE, Item, write_shards
from quark.torch.export.skeleton import map_attention, prepared
from quark.torch.export.state import items_of
from quark.torch.export.stored import StoredTensor
from quark.torch.export.transformers_reads import show_axes_of, why_not, without_values
from quark.torch.export.verify import verify as check_written
from quark.torch.export.vllm_reads import cache_scales_for, warn_of_rounding
from quark.torch.export.widths import check_blocks
from quark.torch.fake_quantize import HALVES, FakeQuantize, parts
from quark.torch.layers import name_in, own_parameter
from quark.torch.quantized_layer import QuantLayer, quantized_layers
from quark.torch.rotated import refuse_to_export
from quark.torch.stage import Stage

Arguments = dict[str, Any]
MX_ELEMENTS = ("fp4_e2m1", "fp6_e2m3", "fp8_e4m3")


def export_compressed_tensors(
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    max_shard_size: int = SHARD_SIZE,
    program: str | None = None,
    verify: bool = True,
) -> None:
    """Write a quantized model in the format ``compressed-tensors``.

    Args:
        model: quantized; it is not changed.
        output_dir: new folder, or one without a model in it.
        max_shard_size: bytes of tensors per file.
        verify: read every tensor back, decode it with the library, and compare it with what the model computes with.
        program: that will read it; "vllm": what transformers would read wrongly is written all the same.

    Raises:
        ConfigError: a scheme that the format does not have (the layer is named), or a model that transformers would
            read wrongly.
        ModelError: a model that is not quantized.
    """
    config = config_of(model)
    refuse_to_export(model)
    warn_of_rope(config, "compressed-tensors", program)
    found = words_of(model, config, program)
    warn_of_rounding(found.schemes, config, "compressed-tensors", program)
    made = [*compressed_items(model, found.schemes, found.formats, program), *cache_items(model, found.caches)]
    items = cache_scales_for(program, config, [*outside_items(made, found.names), *left_out_items(model)])
    with new_folder(output_dir) as folder:
        write_shards(folder, items, "model", max_shard_size)
        copy_beside(model, folder)
        write_config(model, folder, found.described)
        if verify:
            own = foreign(model, found.schemes, found.formats, found.names, items)
            check_written(folder, model, items, found.names, "order", own)


@dataclass(frozen=True)
class Words:
    """What the format says about a model.

    Attributes:
        schemes, formats: of its quantized layers, by name in memory.
        caches: the quantizers of keys and values, by the names of their scales.
        names: of its tensors outside.
        described: its ``quantization_config``.
    """

    schemes: Mapping[str, Any]
    formats: Mapping[str, Any]
    caches: Mapping[str, FakeQuantize]
    names: FileNames
    described: Arguments


def words_of(model: nn.Module, config: QConfig, program: str | None) -> Words:
    """What the format says about a quantized model; no value of a weight is looked at.

    Raises:
        ConfigError: as ``export_compressed_tensors``.
    """
    check_merged(model)
    caches = caches_of(model, config)
    apart = {name: own_slots(name, config) for name, _ in quantized_layers(model)}
    schemes = {
        name: scheme_of(name, layer, apart[name])
        for name, layer in quantized_layers(model)
        if set(dict(layer.quantizers())) - apart[name]
    }
    if "" in schemes:
        raise ConfigError(
            "compressed-tensors names layers, and a model that is one layer has no name: put it in a module"
        )
    names = names_of(model)
    described, formats = quantization_config(schemes, names, excluded(config, model, names, schemes))
    if program != "vllm":
        check_reader(why_not(model, schemes, formats, names, described))
        check_cache_places(model, caches)
    described |= {"kv_cache_scheme": cache_scheme(caches)} if caches else {}
    return Words(schemes, formats, caches, names, described)


def check_before(model: nn.Module, config: QConfig, program: str | None) -> None:
    """Refuse, before any work, what a model would be refused for that is quantized as ``config`` says.

    Args:
        model: float, or a skeleton; it stays as it is.
        config: how it will be quantized.
        program: as in ``export_compressed_tensors``.

    Raises:
        ConfigError, ModelError: likewise, and where the model does not fit the configuration.
    """
    bare = without_values(model)
    map_attention(bare, config)
    made = prepared(bare, config, "order", "fake_quantized")
    words_of(made, config, program)
    if program != "vllm" and show_axes_of(model, made):
        words_of(made, config, program)


def foreign(
    model: nn.Module, schemes: Mapping[str, Any], formats: Mapping[str, Any], names: FileNames, items: Iterable[Item]
) -> dict[str, Foreign]:
    """How the weights are read back, by the names in memory of their layers."""
    written = {name for item in items for name in item.form}
    found, layers = {}, dict(quantized_layers(model))
    for name, scheme in schemes.items():
        outside = names.layer(name)
        parts = {role: f"{outside}.{role}" for role in COMPRESSED if f"{outside}.{role}" in written}
        decode = decompressor(scheme.model_copy(update={"format": formats[name]}), formats[name].value)
        values = in_kernels(decode, stage_of(layers[name]).spec)
        found[name] = Foreign(parts, values, rows_cut, "weight_global_scale" not in parts)
    return found


def stage_of(layer: QuantLayer) -> Stage:
    """The only stage of a weight, which may be stored."""
    held: Any = layer.weight_quantizer
    known_parts = layouts_of(held.layout) if isinstance(held, StoredTensor) else parts(held)
    return next(one.stage for one in known_parts)


def check_reader(reason: str | None) -> None:
    """Raise ``ConfigError`` for what transformers would read wrongly."""
    if reason is not None:
        raise ConfigError(
            f"transformers does not read this model in compressed-tensors: {reason}; it reads the format quark "
            f"(export_safetensors, --format quark), and program='vllm' (--for vllm) writes compressed-tensors for vLLM"
        )


def refuse(name: str, sentence: str) -> NoReturn:
    """Raise ``ConfigError``."""
    raise ConfigError(f"compressed-tensors cannot hold {name!r}: {sentence}")


def scheme_of(name: str, layer: QuantLayer, apart: Collection[str] = ()) -> Any:
    """The ``QuantizationScheme`` of a layer; slots that are told ``apart`` are no part of it."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    if not isinstance(layer, nn.Linear):
        refuse(name, f"it is a {layer.float_class.__name__}, and only linear layers can be")
    slots = dict(layer.quantizers())
    if others := [slot for slot in slots if slot not in ("weight", "input_tensors", *apart)]:
        refuse(name, f"{others[0]} is quantized")
    weight, activation = part_of(name, layer, "weight"), part_of(name, layer, "input_tensors")
    if activation is not None and activation.stage.calibrated and activation.scale is None:
        activation = None  # no sample reached it: it stays float
    if weight is None:
        refuse(name, "its weight is float")
    check_blocks(name, (weight.stage,), layer.in_features, "compressed-tensors")
    inputs = None if activation is None else QuantizationArgs(**arguments(name, activation, weight=False))
    return QuantizationScheme(
        targets=[f"re:^{name}$".replace(".", r"\.")],
        weights=QuantizationArgs(**arguments(name, weight, weight=True)),
        input_activations=inputs,
    )


def part_of(name: str, layer: QuantLayer, slot: str) -> FakeQuantize | None:
    """The only stage of a slot, with its parameters."""
    quantizer = dict(layer.quantizers()).get(slot)
    if quantizer is None:
        return None
    if isinstance(quantizer, StoredTensor):
        quantizer = quantizer.quantizer(own_parameter(layer))
    found = list(parts(quantizer))
    if len(found) != 1:
        refuse(name, f"{slot} has {len(found)} stages")
    if found[0].stage.real_zero:
        refuse(name, f"{slot} has real zero points")
    return found[0]


def arguments(name: str, part: FakeQuantize, weight: bool) -> Arguments:
    """What ``QuantizationArgs`` is made with."""
    stage, row = part.stage, part.stage.format
    if isinstance(row, Block):
        axis = axis_of(part.granularity)
        if axis != -1 and not (weight and axis == 1):
            refuse(name, f"its blocks run along axis {axis}, and all of its blocks run along the last one")
        return block_arguments(name, row, weight)
    if not (isinstance(row, Int) and row.bits in (4, 8)) and row.onnx_type != "FLOAT8E4M3FN":
        refuse(name, f"{row.name} is not a format of it")
    number = "int" if isinstance(row, Int) else "float"
    symmetric = stage.spec.symmetric and row.middle == 0
    made: Arguments = {"num_bits": row.bits, "type": number, "symmetric": symmetric}
    made["dynamic"] = stage.spec.dynamic and not weight
    made["observer_kwargs"] = {OWN: {key: getattr(stage.spec, key) for key in OWN_FIELDS}}
    return {**made, **strategy(name, part, weight)}


def strategy(name: str, part: FakeQuantize, weight: bool) -> Arguments:
    """Which elements share a scale."""
    match part.granularity:
        case Tensor():
            return {"strategy": "tensor"}
        case Token():
            return {"strategy": "token"}
        case Channel(axis=0):
            return {"strategy": "channel"}
        case Group(axis=-1 | 1, size=granularity.WHOLE) if weight:
            return {"strategy": "channel"}
        case Group(axis=-1 | 1, size=granularity.WHOLE):
            refuse(name, "groups of inputs that are as long as a row are scales per token, and are to be called so")
        case Group(axis=-1 | 1, size=size):
            return {"strategy": "group", "group_size": size}
        case Block2D(rows=rows, columns=columns):
            return {"strategy": "block", "block_structure": [rows, columns]}
    refuse(name, f"scales {part.granularity} are none of its strategies")


def block_arguments(name: str, row: Block, weight: bool) -> Arguments:
    """NVFP4 and MX formats."""
    made: Arguments = {"num_bits": row.element.bits, "type": "float", "symmetric": True, "group_size": row.size}
    if row.tensor_scale and (row.rule, row.size) == ("e4m3", 16):
        dynamic: Any = False if weight else "local"
        return {**made, "strategy": "tensor_group", "scale_dtype": torch.float8_e4m3fn, "dynamic": dynamic}
    if row.element.name in MX_ELEMENTS and row.storage.name == "e8m0" and row.size == 32:
        return {**made, "strategy": "group", "scale_dtype": torch.uint8, "dynamic": not weight}
    refuse(name, f"blocks of {row.name} are not a format of it")


def quantization_config(
    schemes: Mapping[str, Any], outside: FileNames, floats: Iterable[str]
) -> tuple[Arguments, dict[str, Any]]:
    """``quantization_config``, with names outside and in memory, and the format of each layer."""
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

    formats = {name: format_of(scheme) for name, scheme in schemes.items()}
    groups: dict[str, Any] = {}
    members: dict[str, list[str]] = {}
    for name, scheme in schemes.items():
        key = f"{scheme.weights} {scheme.input_activations} {formats[name]}"
        members.setdefault(key, []).append(name)
    for number, names in enumerate(members.values()):
        every = [*map(outside.layer, names), *names]
        targets = ["Linear"] if len(members) == 1 else list(dict.fromkeys(every))
        scheme = schemes[names[0]].model_copy(update={"targets": targets, "format": formats[names[0]]})
        groups[f"group_{number}"] = scheme
    chosen = set(formats.values())
    config = QuantizationConfig(
        config_groups=groups,
        format=next(iter(chosen)).value if len(chosen) == 1 else "mixed-precision",
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=[f"re:{re.escape(name[:-1])}.*" if name.endswith("*") else name for name in floats],
    )
    return {**config.model_dump(mode="json"), "quant_method": "compressed-tensors"}, formats


def format_of(scheme: Any) -> Any:
    """The format of a layer: the library's choice, but integers below 8 bits are packed beside activations too.

    vLLM looks for ``pack-quantized`` there (``CompressedTensorsWNA8Int``, ``CompressedTensorsW4A8Fp8``).
    """
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.config import CompressionFormat

    weights, inputs = scheme.weights, scheme.input_activations
    narrow = weights.type == "int" and weights.num_bits < 8 and weights.symmetric
    grouped = narrow and weights.strategy in ("group", "channel")
    dynamic = inputs is not None and inputs.dynamic and inputs.symmetric and inputs.strategy in ("token", "group")
    return CompressionFormat.pack_quantized if grouped and dynamic else infer_module_format(nn.Linear, scheme)


def compressed_items(
    model: nn.Module, schemes: Mapping[str, Any], formats: Mapping[str, Any], program: str | None
) -> list[Item]:
    """All tensors of the model; the weights of quantized layers as the library packs them."""
    layers = {name: layer for name, layer in quantized_layers(model) if name in schemes}
    own = {name_in(name, "weight") for name in layers}
    parameters = tuple(name_in(name, f"{kind}_") for name, _ in quantized_layers(model) for kind in ("input", "output"))
    items = [
        item
        for item in items_of(model, "order", "fake_quantized")
        if not own & set(item.form) and not all(name.startswith(parameters) for name in item.form)
    ]
    casts: dict[str, float] = {}
    made = [layer_item(name, layer, schemes[name], formats[name], casts) for name, layer in layers.items()]
    packed = {name for name in layers if formats[name].value == "pack-quantized"}
    read = packed if program == "vllm" else set(layers)  # vLLM keeps other scales in float32
    warn_of_casts("compressed-tensors", model, max((casts[name] for name in read), default=0.0))
    return items + made


def layer_item(name: str, layer: QuantLayer, scheme: Any, format: Any, casts: dict[str, float]) -> Item:
    """The tensors of one layer; ``casts`` gets how far a cast to the layer's type moves its scales."""

    def make() -> dict[str, torch.Tensor]:
        from compressed_tensors.compressors import BaseCompressor

        compressor: Any = BaseCompressor.get_value_from_registry(format.value)
        packed = compressor.compress(state_of(name, layer, scheme, format), scheme)
        return {name_in(name, key): value.detach().contiguous() for key, value in packed.items()}

    first = make()
    scales = (value for key, value in first.items() if key.endswith("_scale"))
    casts[name] = max((moved(value, float_type(layer)) for value in scales), default=0.0)
    return Item({key: (tuple(value.shape), value.dtype) for key, value in first.items()}, make)


def float_type(layer: QuantLayer) -> torch.dtype:
    """The type of a layer's weight as it is computed with."""
    quantizer = layer.weight_quantizer
    return quantizer.dtype if isinstance(quantizer, StoredTensor) else own_parameter(layer).dtype


@torch.no_grad()
def state_of(name: str, layer: QuantLayer, scheme: Any, format: Any) -> dict[str, torch.Tensor]:
    """Values and parameters of a layer, as the library names and shapes them."""
    part: Any = part_of(name, layer, "weight")
    quantizer: Any = layer.weight_quantizer
    weight: Any = layer._parameters["weight"]
    kept = {**quantizer.stored, CODES: weight.detach()} if isinstance(quantizer, StoredTensor) else None
    if kept is not None:  # not in the type of the model, which would round 8 bits beside a zero point
        values = quantizer.layout.restore(kept)
    else:
        values = weight if layer.frozen else quantizer(weight.detach())
    origin = values if kept is not None or layer.frozen else weight.detach()
    state = {"weight": values.float(), **weight_parameters(part, values, scheme, origin, kept)}
    activation: Any = part_of(name, layer, "input_tensors")
    halved = activation is not None and activation.stage.spec.scale_rule in HALVES
    if format.value == "pack-quantized" or halved:
        state["weight_scale"] = in_type_of_model(state["weight_scale"], float_type(layer))
    if activation is not None and activation.scale is not None and activation.stage.calibrated:
        scale, block = activation.scale.float().reshape(-1), activation.stage.is_block
        found = in_type_of_model(scale, float_type(layer)) if halved else scale
        state["input_global_scale" if block else "input_scale"] = 1 / scale if block else found
        if not scheme.input_activations.symmetric:
            state["input_zero_point"] = signed(activation, activation.zero_point).to(torch.int8).reshape(-1)
    return state


def weight_parameters(
    part: FakeQuantize,
    values: torch.Tensor,
    scheme: Any,
    origin: torch.Tensor,
    kept: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Scale, zero point and tensor scale of a weight; of one that is ``kept`` as codes those that it has.

    A dynamic range is that of ``origin``, what was rounded to ``values``: these may ask for another one.
    """
    layout = layout_of_quantizer(part, tuple(values.shape))
    if isinstance(layout, BlockLayout):
        stored = kept or store(values, part, frozen=True)
        storage, coded = layout.block.storage, stored["scale"].view(torch.uint8)
        made = {"weight_scale": storage.decode(coded).float()}
        if layout.block.tensor_scale:
            made["weight_global_scale"] = 1 / stored["scale_2"].reshape(1)
        return made
    scale, zero_point = (part.scale, part.zero_point) if part.scale is not None else part.parameters_from(origin)
    shape = scale_shape(part, values)
    made = {"weight_scale": known(scale, "the scale of a weight").float().reshape(shape)}
    if not scheme.weights.symmetric:
        made["weight_zero_point"] = signed(part, known(zero_point, "its zero point")).to(torch.int8).reshape(shape)
    return made


def scale_shape(part: FakeQuantize, values: torch.Tensor) -> tuple[int, ...]:
    """The shape that the library wants scales in."""
    match part.granularity:
        case Tensor():
            return (1,)
        case Group() | Block2D():
            return part.granularity.grid(tuple(values.shape))
    return values.shape[0], 1


def signed(part: FakeQuantize, zero_point: torch.Tensor) -> torch.Tensor:
    """A zero point among signed codes."""
    row = as_a(Int, part.stage.format)
    return zero_point - (0 if row.signed else 1 << row.bits - 1)
