"""Checkpoints under the names of other programs: ``custom_mode`` "fp8", "awq", "gptq", "gptq_v2", "modelopt", "mxfp4".

    fp8   weight and activations E4M3 per tensor; ``input_scale``, ``weight_scale``, and ``k_scale``, ``v_scale`` of the
          attention module; or weights in blocks (DeepSeek's 128 x 128), ``weight_scale_inv``, and activations in groups
          as long as a block, at run time
    awq   4-bit codes in groups along the inputs; ``qweight``, ``qzeros``, ``scales``, version "gemm"
    gptq, gptq_v2   integers of 2 to 8 bits, weights only: ``quark.torch.export.gptq``
    modelopt        FP8, MXFP8 and NVFP4: ``quark.torch.export.modelopt``
    mxfp4           experts of gpt_oss: ``quark.torch.export.stacked_blocks``

The tensors are those of ``quark``; only names and ``quantization_config`` differ, and for GPTQ the packing. A
configuration that a mode cannot say is refused. AWQ kernels read unsigned codes with zero points.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, cast

from torch import nn

from quark.errors import ConfigError
from quark.torch.config.model import SLOTS, QConfig, QLayerConfig
from quark.torch.config.specs import FP8E4M3PerGroupSpec, FP8E4M3PerTensorSpec, Uint4PerGroupSpec
from quark.torch.config.tensor import QTensorConfig
from quark.torch.config.type import Dtype, QSchemeType
from quark.torch.export import gptq, modelopt, stacked_blocks
from quark.torch.export.decoded import (
    Decoder,
    Foreign,
    awq_values,
    columns_cut,
    fp8_decoder,
    gptq_decoder,
    rows_cut,
)
from quark.torch.export.described import tells_caches
from quark.torch.export.layout import ElementLayout, Form, Layout, PairLayout, Stored
from quark.torch.export.original import FileNames
from quark.torch.export.shards import Item
from quark.torch.export.widths import check_words
from quark.torch.fake_quantize import HALVES
from quark.torch.quantized_layer import quantized_layers

CUSTOM_MODES = ("fp8", "awq", *gptq.VERSIONS, "modelopt", stacked_blocks.MODE)
SIGNS = -0x77777778  # 0x88888888: the highest bit of each of eight codes
RENAMED = {
    "quark": (),
    "fp8": (
        (r"^(.*\.)k_proj\.output_scale$", r"\1k_scale"),
        (r"^(.*\.)v_proj\.output_scale$", r"\1v_scale"),
    ),
    "fp8 blocks": ((r"^(.*\.)weight_scale$", r"\1weight_scale_inv"),),
    "awq": (
        (r"^(.*\.)weight_scale$", r"\1scales"),
        (r"^(.*\.)weight_zero_point$", r"\1qzeros"),
    ),
    **dict.fromkeys(gptq.VERSIONS, ()),
    "modelopt": modelopt.RENAMED,
}
BACK = {
    "quark": (  # caches in files for vLLM: ``vllm_reads.py``
        (r"(?<=\.attn)\.attn\.([kv])_scale$", r".\1_proj.output_scale"),
        (r"\.([kv])_scale$", r".\1_proj.output_scale"),
    ),
    "fp8": (
        (r"\.k_scale$", ".k_proj.output_scale"),
        (r"\.v_scale$", ".v_proj.output_scale"),
        (r"\.weight_scale_inv$", ".weight_scale"),
    ),
    "awq": ((r"\.qweight$", ".weight"), (r"\.scales$", ".weight_scale"), (r"\.qzeros$", ".weight_zero_point")),
}
KV = ("*k_proj", "*v_proj")


def naming_of(config: QConfig, mode: str) -> str:
    """Which names of ``RENAMED`` a mode gives the tensors of a configuration."""
    return "fp8 blocks" if mode == "fp8" and is_fp8_block(single(config.global_quant_config, "weight", mode)) else mode


def custom_name(name: str, naming: str, coded: bool) -> str:
    """The name that a mode gives a tensor; ``coded`` ones are codes."""
    if naming == "awq" and coded and name.endswith(".weight"):
        return name.removesuffix("weight") + "qweight"
    for pattern, target in RENAMED[naming]:
        name = re.sub(pattern, target, name)
    return name


def quark_name(name: str, mode: str) -> str:
    """The name of a tensor that a mode has renamed."""
    for pattern, target in BACK[mode]:
        name = re.sub(pattern, target, name)
    return name


def key_mapping(mode: str) -> dict[str, str] | None:
    """The same, as ``from_pretrained`` of transformers takes it; ``loader.py`` renames those of "quark" itself."""
    return dict(BACK[mode]) if mode != "quark" else None


def custom_config(config: QConfig, mode: str, export: Mapping[str, Any], excluded: Iterable[str]) -> dict[str, Any]:
    """``quantization_config`` of a mode.

    Args:
        config: of the model.
        mode: one of ``CUSTOM_MODES``.
        export: how tensors are stored.
        excluded: names of linear layers that stay float.

    Raises:
        ConfigError: the mode cannot say what ``config`` says.
    """
    if config.layer_quant_config or config.layer_type_quant_config:
        refuse(mode, "all layers are alike: no layer_quant_config or layer_type_quant_config")
    for stage in config.global_quant_config.stages("input_tensors"):
        if stage.spec.scale_rule in HALVES:
            refuse(
                mode,
                f"inputs are rounded in {stage.spec.scale_rule}, that of their scales, and what reads this does it in "
                f"float32; quantized again (`convert --requantize`), they are, too",
            )
    if not tells_caches(config):
        refuse(mode, "keys and values are made by layers of their own, and are not turned")
    if mode in gptq.VERSIONS:
        return gptq.gptq_config(config, mode, excluded)
    if mode == "modelopt":
        return modelopt.modelopt_config(config, excluded)
    if mode == stacked_blocks.MODE:
        return stacked_blocks.stacked_config(config, excluded)
    made = fp8_config(config) if mode == "fp8" else awq_config(config)
    return {"quant_method": mode, **made, "export": dict(export)}


def custom_items(
    model: nn.Module, items: Iterable[Item], layouts: Mapping[str, Layout | PairLayout], mode: str, config: QConfig
) -> list[Item]:
    """Items as a mode has them.

    Args:
        model: quantized.
        items: tensors as ``quark`` stores them.
        layouts: how the weights that are kept as codes are stored, by their names.
        mode: one of ``CUSTOM_MODES``.
        config: of the model.
    """
    if mode == stacked_blocks.MODE:
        return stacked_blocks.stacked_items(model, items, layouts)
    if not has_one_scale(config):
        check_linear(model, mode)
    if mode in gptq.VERSIONS:
        return [gptq_item(item, layouts, mode) for item in items]
    if mode == "awq":
        for name, layout in layouts.items():
            check_words(name, 4, {"outputs": layout.shape[0]})
    weight = single(config.global_quant_config, "weight", mode) if mode == "awq" else None
    signed = weight is not None and weight.dtype is Dtype.int4
    naming = naming_of(config, mode)
    return [renamed_item(item, naming, set(layouts), signed) for item in items]


def has_one_scale(config: QConfig) -> bool:
    """Whether weights are FP8 with one scale, which fits a weight of any shape."""
    return modelopt.word_of(config.global_quant_config, "weight") == "fp8_e4m3 tensor"


def check_linear(model: nn.Module, mode: str) -> None:
    """Refuse layers whose weights are not [out, in]: words are packed, and scales shared, along these.

    Raises:
        ConfigError: there is one.
    """
    for name, layer in quantized_layers(model):
        if layer.weight_quantizer is not None and not isinstance(layer, nn.Linear):
            refuse(mode, f"{name!r} is a {layer.float_class.__name__}, and only linear layers are stored so")


def gptq_item(item: Item, layouts: Mapping[str, Layout | PairLayout], mode: str) -> Item:
    """One item of a GPTQ checkpoint: a weight is packed anew, others stay."""
    name = next((name for name in item.form if name in layouts), None)
    if name is None:
        return item
    layout = layouts[name]
    if not isinstance(layout, ElementLayout) or len(layout.shape) != 2:
        refuse(mode, f"{name!r} is no matrix of integers")

    def make() -> Stored:
        stored = {key.removeprefix(name).removeprefix("_"): value for key, value in item.make().items()}
        return gptq.gptq_tensors(name, layout, stored, gptq.VERSIONS[mode])

    return Item(gptq.gptq_form(name, layout), make)


def renamed_item(item: Item, naming: str, coded: set[str], signed: bool) -> Item:
    """One item under the names of a mode; 4-bit codes become unsigned for "awq"."""
    names = {name: custom_name(name, naming, name in coded) for name in item.form}
    form: Form = {names[name]: entry for name, entry in item.form.items()}
    words = {name for name in names if signed and names[name].rpartition(".")[2] in ("qweight", "qzeros")}

    def make() -> Stored:
        return {names[name]: value ^ SIGNS if name in words else value for name, value in item.make().items()}

    return Item(form, make)


def foreign(model: nn.Module, names: FileNames, entry: Mapping[str, Any]) -> dict[str, Foreign]:
    """How the weights of a mode are read back, by the names in memory of their layers; none of modes without a rule.

    Args:
        model: quantized.
        names: of its tensors outside.
        entry: ``quantization_config`` of the mode.
    """
    method, bits = entry.get("quant_method"), cast(int, entry.get("bits"))
    if method == stacked_blocks.MODE:
        return stacked_blocks.stacked_foreign(model, names)
    lowered, blocks = int(entry.get("checkpoint_format") == "gptq"), entry.get("weight_block_size")
    scale = "weight_scale_inv" if blocks else "weight_scale"
    decoder = fp8_decoder(tuple(blocks) if blocks else None)
    rules: dict[Any, tuple[tuple[str, ...], Decoder, Any]] = {
        "awq": (("qweight", "qzeros", "scales"), awq_values, columns_cut),
        "gptq": (("qweight", "qzeros", "scales", "g_idx"), gptq_decoder(bits, lowered), columns_cut),
        "fp8": (("weight", scale), lambda found: decoder({"weight": found["weight"], "scale": found[scale]}), rows_cut),
    }
    if method == "modelopt":
        rules["modelopt"] = (*modelopt.decoder_of(entry["quant_algo"]), rows_cut)
    if method not in rules:
        return {}
    roles, decode, cut = rules[method]
    coded = (name for name, layer in quantized_layers(model) if layer.weight_quantizer is not None)
    places = {name: {role: f"{names.layer(name)}.{role}" for role in roles} for name in coded}
    return {name: Foreign(own, decode, cut, method != "modelopt") for name, own in places.items()}


def refuse(mode: str, sentence: str) -> NoReturn:
    """Raise ``ConfigError``."""
    raise ConfigError(f"custom_mode {mode!r} does not fit this configuration: {sentence}")


def single(layer: QLayerConfig, slot: str, mode: str) -> QTensorConfig | None:
    """The configuration of a slot that has one stage at most."""
    found = getattr(layer, slot)
    if isinstance(found, list):
        refuse(mode, f"{slot} has {len(found)} stages, and one is all that it can have")
    return found


def is_fp8(found: QTensorConfig | None) -> bool:
    """E4M3 under one scale."""
    return found is not None and (found.dtype, found.qscheme) == (Dtype.fp8_e4m3, QSchemeType.per_tensor)


def is_fp8_block(found: QTensorConfig | None) -> bool:
    """E4M3 under a scale per two-dimensional block."""
    return found is not None and (found.dtype, found.qscheme) == (Dtype.fp8_e4m3, QSchemeType.per_block)


def fp8_block_config(config: QConfig, weight: QTensorConfig) -> dict[str, Any]:
    """What "fp8" says about weights in blocks."""
    inputs = single(config.global_quant_config, "input_tensors", "fp8")
    size = [int(length) for length in weight.block_size or ()]
    wanted = FP8E4M3PerGroupSpec(-1, size[1], is_dynamic=True).to_quantization_spec()
    others = [slot for slot in ("output_tensors", "bias") if getattr(config.global_quant_config, slot) is not None]
    if inputs is None or inputs.to_stage() != wanted.to_stage() or others or config.kv_cache_quant_config:
        refuse(
            "fp8",
            f"with weights in blocks of {size[0]} x {size[1]} the input must be "
            f"FP8E4M3PerGroupSpec(-1, {size[1]}, is_dynamic=True), and nothing else is quantized",
        )
    if weight.is_dynamic or weight.to_stage().spec.scale_rule != "float32":
        refuse("fp8", "weights are static, and their scales float32")
    return {"activation_scheme": "dynamic", "weight_block_size": size, "ignored_layers": list(config.exclude)}


def fp8_config(config: QConfig) -> dict[str, Any]:
    """What "fp8" says."""
    blocks = single(config.global_quant_config, "weight", "fp8")
    if blocks is not None and is_fp8_block(blocks):
        return fp8_block_config(config, blocks)
    weight, inputs, outputs, bias = (
        single(config.global_quant_config, slot, "fp8")
        for slot in ("weight", "input_tensors", "output_tensors", "bias")
    )
    if not is_fp8(weight) or not (inputs is None or is_fp8(inputs)) or outputs or bias:
        refuse("fp8", "weight and input must be fp8_e4m3 per_tensor, or weights per_block; output and bias None")
    caches = [single(layer, "output_tensors", "fp8") for layer in config.kv_cache_quant_config.values()]
    if not all(found is not None and is_fp8(found) and not found.is_dynamic for found in caches):
        refuse("fp8", "keys and values must be fp8_e4m3 per_tensor, static")
    return {
        "activation_scheme": None if inputs is None else "dynamic" if inputs.is_dynamic else "static",
        "weight_block_size": None,
        "ignored_layers": list(config.exclude),
        "kv_cache_scheme": "static" if caches else None,
    }


def awq_config(config: QConfig) -> dict[str, Any]:
    """What "awq" says."""
    layer = config.global_quant_config
    weight = single(layer, "weight", "awq")
    others = [slot for slot in SLOTS if slot != "weight" and getattr(layer, slot) is not None]
    if weight is None or weight.dtype not in (Dtype.int4, Dtype.uint4) or weight.qscheme is not QSchemeType.per_group:
        refuse("awq", "weight must be int4 or uint4 per_group")
    plain = weight.ch_axis in (None, 1, -1) and not weight.to_stage().real_zero
    if others or config.kv_cache_quant_config or not plain:
        refuse("awq", "only weights are quantized, in groups along ch_axis=-1, with integer zero points")
    return {
        "bits": 4,
        "group_size": weight.group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(config.exclude),
        "pack_method": "reorder",
    }


def from_custom(data: Mapping[str, Any]) -> QConfig:
    """The configuration that a mode's ``quantization_config`` means.

    Raises:
        ConfigError: an entry that no mode writes.
    """
    if data.get("quant_method") == "fp8":
        return from_fp8(data)
    if data.get("quant_method") != "awq":
        raise ConfigError(f"quant_method {data.get('quant_method')!r} is not read here; fp8 and awq are")
    if data.get("bits") != 4 or data.get("version", "gemm") != "gemm":
        raise ConfigError("quant_method 'awq': only bits=4 and version='gemm' can be read")
    spec = Uint4PerGroupSpec(-1, int(data["group_size"]), symmetric=False).to_quantization_spec()
    return QConfig(QLayerConfig(weight=spec), exclude=list(data.get("modules_to_not_convert") or []))


def from_fp8(data: Mapping[str, Any]) -> QConfig:
    """The configuration that "fp8" means."""
    scheme = data.get("activation_scheme")
    if data.get("weight_block_size"):
        return from_fp8_blocks(data)
    if scheme not in (None, "static", "dynamic"):
        raise ConfigError(f"quant_method 'fp8': activation_scheme is None, 'static' or 'dynamic', not {scheme!r}")
    static = FP8E4M3PerTensorSpec().to_quantization_spec()
    inputs = None if scheme is None else FP8E4M3PerTensorSpec(is_dynamic=scheme == "dynamic").to_quantization_spec()
    caches = {name: QLayerConfig(output_tensors=static) for name in KV} if data.get("kv_cache_scheme") else {}
    return QConfig(
        QLayerConfig(weight=static, input_tensors=inputs),
        exclude=list(data.get("ignored_layers") or []),
        kv_cache_quant_config=caches,
        kv_cache_post_rope=bool(caches),
    )


def from_fp8_blocks(data: Mapping[str, Any]) -> QConfig:
    """The configuration that "fp8" with ``weight_block_size`` means."""
    check_fp8_blocks(data)
    size = data["weight_block_size"]
    if data.get("activation_scheme") != "dynamic" or data.get("scale_fmt") not in (None, "float"):
        raise ConfigError(
            "quant_method 'fp8' with weight_block_size: only activation_scheme 'dynamic' with float scales"
        )
    weight = QTensorConfig(
        Dtype.fp8_e4m3, qscheme=QSchemeType.per_block, block_size=tuple(size), symmetric=True, is_dynamic=False
    )
    inputs = FP8E4M3PerGroupSpec(-1, size[1], is_dynamic=True).to_quantization_spec()
    ignored = data.get("ignored_layers") or data.get("modules_to_not_convert") or []
    return QConfig(QLayerConfig(weight=weight, input_tensors=inputs), exclude=list(ignored))


def check_fp8_blocks(data: Mapping[str, Any]) -> None:
    """What "fp8" says of its blocks, if it has them.

    Raises:
        ConfigError: no size of blocks, or inputs under one scale.
    """
    size = data.get("weight_block_size")
    if not size:
        return
    if not (isinstance(size, list | tuple) and len(size) == 2 and all(type(k) is int and k > 0 for k in size)):
        raise ConfigError(f"quant_method 'fp8': weight_block_size must be two positive integers, not {size!r}")
    if data.get("activation_scheme") not in (None, "dynamic"):
        raise ConfigError(
            f"quant_method 'fp8' with weight_block_size: activation_scheme is 'dynamic' or None, not "
            f"{data['activation_scheme']!r}"
        )


class QuantConfigParser:
    """Where transformers asks for the configuration of a custom mode."""

    @staticmethod
    def from_custom_config(config: Mapping[str, Any], is_bias_quantized: bool = False) -> QConfig:
        """The configuration that a mode's ``quantization_config`` means."""
        if is_bias_quantized:
            raise ConfigError("custom modes have no quantized biases")
        return from_custom(config)
