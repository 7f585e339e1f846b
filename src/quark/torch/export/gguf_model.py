"""``export_gguf``: a model of the Llama family (llama, mistral, qwen2) as one file for llama.cpp.

    int4, int3, int2 symmetric    Q4_0        MXFP4                 MXFP4
    4 bits with zero points       Q4_1        other layers          float_type (F16), norms F32
    int8 symmetric                Q8_0        weight_type="Q6_K"    all linear layers, rounded again from their values

Groups are 32 numbers or a multiple of it. Codes are those of the quantized model; scales become float16, so with
``scale_type="float16"`` in the configuration a file is what was evaluated, bit for bit (but for minima of Q4_1). Rows
of query and key projections are permuted to the order of GGML's rotary embedding (llama, mistral).

Activations are not quantized by llama.cpp in our way: their configuration is not written, and a warning says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.errors import ConfigError, ModelError, unknown
from quark.files.folder import new_folder
from quark.numerics.elements import Int
from quark.numerics.granularity import Channel, Group, Tensor, normal_axis
from quark.torch.export.ggml_blocks import BLOCK, K_QUANTS, SUPER, k_block, mxfp4_block, simple_block
from quark.torch.export.gguf_vocabulary import add_vocabulary
from quark.torch.export.layout import BlockLayout, ElementLayout, layout_of_quantizer, store
from quark.torch.export.state import own_tensors
from quark.torch.export.stored import StoredTensor
from quark.torch.quantized_layer import QuantLayer, quantized_layers
from quark.torch.rotated import refuse_to_export

log = logging.getLogger(__name__)
FLOATS = ("F32", "F16", "BF16")
LIBRARY = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
TYPES = (*FLOATS, *LIBRARY, *K_QUANTS)
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 11, "Q4_K": 14,
    "Q5_K": 16, "Q6_K": 18, "BF16": 32, "MXFP4": 38,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A tensor of the file.

    Attributes:
        name: in the file.
        kind: GGML type.
        shape: of the numbers.
        make: the data: float arrays, or bytes of blocks [rows, bytes].
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


def export_gguf(
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_type: str,
    tokenizer_path: str | os.PathLike[str],
    weight_type: str | None = None,
    float_type: str = "F16",
) -> None:
    """Write ``<output_dir>/<model_type>.gguf``.

    Args:
        model: of transformers; quantized, or float with ``weight_type``.
        output_dir: made if it is not there.
        model_type: "llama", "mistral" or "qwen2".
        tokenizer_path: folder with ``tokenizer.model`` or ``tokenizer.json``.
        weight_type: GGML type of all linear layers that are quantized (of a float model: of all but the output),
            rounded from their values; None: that of their scheme.
        float_type: "F16", "BF16" or "F32", for embeddings and layers that are not quantized.

    Raises:
        ConfigError: a type or scheme that GGUF does not have; the tensor is named.
        ModelError: another architecture, a tokenizer that does not fit, rotations or branches that GGUF does not hold.
    """
    for name, value, allowed in (
        ("model_type", model_type, ARCHITECTURES),
        ("float_type", float_type, FLOATS),
        ("weight_type", weight_type or "F16", TYPES),
    ):
        if value not in allowed:
            raise ConfigError(unknown(name, value, allowed))
    refuse_to_export(model)
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) != model_type:
        raise ModelError(f"the model is {getattr(config, 'model_type', None)!r}, not {model_type!r}")
    if any(slot == "input_tensors" for _, layer in quantized_layers(model) for slot, _ in layer.quantizers()):
        log.warning("GGUF holds no quantized activations: llama.cpp computes with its own")
    entries = [entry_of(name, value, model, config, weight_type, float_type) for name, value in tensors_of(model)]
    target = Path(output_dir) / f"{model_type}.gguf"
    if target.exists():
        raise ConfigError(f"{str(target)!r} is there already; delete it, or export to another folder")
    with new_folder(output_dir, beside=True) as folder:
        write(folder / target.name, entries, config, model_type, Path(tokenizer_path))


def tensors_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of the state, without quantizers."""
    return list(own_tensors(model, dict(quantized_layers(model))))


def entry_of(
    name: str, value: torch.Tensor, model: nn.Module, config: Any, weight_type: str | None, float_type: str
) -> Entry:
    """One tensor of the model."""
    layer_name, _, slot = name.rpartition(".")
    layer = model.get_submodule(layer_name)
    coded = isinstance(layer, QuantLayer) and layer._modules[f"{slot}_quantizer"] is not None
    turn = permutation(name, config)
    target = file_name(name, config)
    float_linear = (
        isinstance(layer, nn.Linear) and not any(True for _ in quantized_layers(model)) and "lm_head" not in name
    )
    if slot == "weight" and weight_type is not None and (coded or float_linear):
        shape = shape_of(layer, value)
        check_rows(name, weight_type, shape[-1])
        return Entry(target, weight_type, shape, lambda: rounded(turn(values_of(layer, slot)), weight_type))
    if coded and slot == "weight":
        return coded_entry(name, target, layer, turn)  # type: ignore[arg-type]
    kind = "F32" if value.dim() == 1 else float_type
    return Entry(target, kind, tuple(value.shape), lambda: rounded(turn(values_of(layer, slot)), kind))


def shape_of(layer: nn.Module, value: torch.Tensor) -> tuple[int, ...]:
    """The shape of a weight, whatever form it is kept in."""
    quantizer = layer._modules.get("weight_quantizer")
    return quantizer.layout.shape if isinstance(quantizer, StoredTensor) else tuple(value.shape)


@torch.no_grad()
def values_of(layer: nn.Module, slot: str) -> np.ndarray:
    """float32 values of a parameter as the model computes with it."""
    value: Any = layer._parameters[slot]
    if isinstance(layer, QuantLayer):
        quantizer = layer._modules[f"{slot}_quantizer"]
        if quantizer is not None and (isinstance(quantizer, StoredTensor) or not layer.frozen):
            value = quantizer(value.detach())
    return value.detach().float().cpu().numpy()


def check_rows(name: str, kind: str, length: int) -> None:
    """Blocks divide the rows."""
    block = 1 if kind in FLOATS else SUPER if kind in K_QUANTS else BLOCK
    if length % block:
        raise ConfigError(f"{name!r} has rows of {length} numbers, and {kind} has blocks of {block}")


def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    """Values as the data of a type."""
    import gguf

    if kind in K_QUANTS:
        return k_block(kind, values)
    if kind in ("F32", "F16"):
        return values.astype(np.float32 if kind == "F32" else np.float16)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])


def coded_entry(name: str, target: str, layer: QuantLayer, turn: Callable[[np.ndarray], np.ndarray]) -> Entry:
    """A weight whose codes go into the file."""
    quantizer: Any = layer.weight_quantizer
    if isinstance(quantizer, StoredTensor):
        quantizer = quantizer.quantizer(layer._parameters["weight"])  # type: ignore[arg-type]
    shape = shape_of(layer, layer._parameters["weight"])  # type: ignore[arg-type]
    layout = layout_of_quantizer(quantizer, shape, "order")
    if isinstance(layout, BlockLayout) and layout.block.name.startswith("mxfp4") and layout.block.size == BLOCK:
        check_rows(name, "MXFP4", shape[-1])
        return Entry(target, "MXFP4", shape, lambda: mxfp4_data(layer, quantizer, layout, turn))
    if not (isinstance(layout, ElementLayout) and isinstance(layout.element, Int)) or not fits(layout):
        raise ConfigError(
            f"{name!r} is {layout_name(layout)}, which no GGUF type holds; integers of 2 to 4 bits and symmetric int8 "
            f"in groups of a multiple of 32 along the inputs can be, and MXFP4; weight_type rounds to another type"
        )
    kind = "Q8_0" if layout.element.bits == 8 else "Q4_0" if layout.stage.spec.symmetric else "Q4_1"
    check_rows(name, kind, shape[-1])
    return Entry(target, kind, shape, lambda: integer_data(kind, layer, quantizer, layout, turn))


def layout_name(layout: Any) -> str:
    """A layout in words."""
    stage = layout.stage if hasattr(layout, "stage") else layout.second.stage
    return stage.spec.describe()


def fits(layout: ElementLayout) -> bool:
    """Whether blocks of 32 have one scale, and a type has the codes."""
    row, granularity = layout.element, layout.granularity
    whole = isinstance(granularity, Tensor) or (isinstance(granularity, Channel) and granularity.axis in (0, -2))
    if isinstance(granularity, Group):
        grouped = normal_axis(granularity.axis, layout.shape) == len(layout.shape) - 1
        whole = grouped and (granularity.size % BLOCK == 0 or granularity.size >= layout.shape[-1])
    wide = row.bits == 8 and not (layout.stage.spec.symmetric and getattr(row, "signed", False))
    return whole and row.bits in (2, 3, 4, 8) and not wide and not layout.stage.real_zero


def integer_data(
    kind: str, layer: QuantLayer, quantizer: Any, layout: ElementLayout, turn: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Codes, scales and minima of a weight as bytes."""
    values = torch.from_numpy(values_of(layer, "weight"))
    stored = store(values, quantizer, "order", frozen=True)
    codes = layout.turn(layout.codes.get(stored[""], layout.element, layout.turned(layout.shape), "order"))
    scale, zero_point = layout.scale(stored), layout.zero_point(stored)
    tensors = (
        codes.to(torch.int32),
        layout.granularity.expand(scale, layout.shape)[:, ::BLOCK],
        layout.granularity.expand(zero_point, layout.shape)[:, ::BLOCK],
    )
    rows, steps, zeros = (turn(tensor.numpy(force=True)) for tensor in tensors)
    if kind == "Q8_0":
        return simple_block(kind, rows, steps)
    middle = 8 - layout.element.middle
    if kind == "Q4_0":
        return simple_block(kind, rows + middle, steps)
    lowest = int(layout.element.min)
    return simple_block(kind, rows - lowest, steps, -steps * (zeros - lowest))


def mxfp4_data(
    layer: QuantLayer, quantizer: Any, layout: BlockLayout, turn: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Codes and exponents of a weight as bytes."""
    stored = store(torch.from_numpy(values_of(layer, "weight")), quantizer, "order", frozen=True)
    codes = layout.codes.get(stored[""], layout.block.element, layout.shape, "order")
    return mxfp4_block(turn(codes.numpy(force=True)), turn(stored["scale"].numpy(force=True)))


def permutation(name: str, config: Any) -> Callable[[np.ndarray], np.ndarray]:
    """What happens to the rows of a tensor: queries and keys of Llama interleave the halves of each head."""
    if ARCHITECTURES[config.model_type] != "llama" or not (".q_proj." in name or ".k_proj." in name):
        return lambda x: x
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    return lambda x: x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def file_name(name: str, config: Any) -> str:
    """The name of a tensor in the file.

    Raises:
        ModelError: there is none.
    """
    import gguf

    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}[ARCHITECTURES[config.model_type]]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise ModelError(f"GGUF has no name for the tensor {name!r} of a {config.model_type} model")
    return found


def write(path: Path, entries: list[Entry], config: Any, model_type: str, tokenizer: Path) -> None:
    """The file: metadata, vocabulary, tensors one after the other."""
    import gguf

    writer = gguf.GGUFWriter(path, ARCHITECTURES[model_type])
    try:
        add_metadata(writer, config, entries)
        add_vocabulary(writer, tokenizer, config.vocab_size, model_type)
        for entry in entries:
            kind = gguf.GGMLQuantizationType[entry.kind]
            block, size = gguf.GGML_QUANT_SIZES[kind]
            nbytes = int(np.prod(entry.shape)) // block * size
            shape = entry.shape if entry.kind in ("F32", "F16") else gguf.quant_shape_to_byte_shape(entry.shape, kind)
            dtype = {"F32": np.float32, "F16": np.float16}.get(entry.kind, np.uint8)
            writer.add_tensor_info(entry.name, shape, np.dtype(dtype), nbytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in entries:
            writer.write_tensor_data(np.ascontiguousarray(entry.make()))
    finally:
        writer.close()


def add_metadata(writer: Any, config: Any, entries: list[Entry]) -> None:
    """What llama.cpp has to know about the network."""
    kinds = [entry.kind for entry in entries if len(entry.shape) > 1 and entry.name.startswith("blk.")]
    writer.add_name((config.architectures or [config.model_type.title()])[0])
    writer.add_file_type(FILE_TYPES[max(set(kinds), key=kinds.count)])
    writer.add_quantization_version(2)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    add_rope(writer, config)


def add_rope(writer: Any, config: Any) -> None:
    """The rotary embedding.

    Raises:
        ModelError: a scaling that the file cannot say.
    """
    import gguf

    rope = dict(getattr(config, "rope_parameters", None) or {})
    writer.add_rope_freq_base(float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))))
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif kind != "default":
        raise ModelError(f"the rotary embedding is scaled by {kind!r}; 'default' and 'linear' can be written")
