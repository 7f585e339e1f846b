"""``export_gguf``: a language model as one file for llama.cpp.

Types and bytes of the tensors: ``gguf_tensors``; what architectures need: ``gguf_architectures``. Codes are those of
the quantized model; scales become float16, so with ``scale_type="float16"`` in the configuration a file is what was
evaluated, bit for bit (but for minima of Q4_1). What the file loses as a whole is measured, told and returned.

Activations are not quantized by llama.cpp in our way: a model whose inputs or caches are quantized is refused.
"""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import nn

from quark.errors import ConfigError, ModelError, check_name
from quark.files.folder import new_folder
from quark.torch.config.model import QConfig
from quark.torch.experts import is_fused, unfuse_experts
from quark.torch.export.gguf_architectures import add_numbers, architecture_of, check_network, row_of, slides
from quark.torch.export.gguf_rope import long_factors, rope_factors, rope_of
from quark.torch.export.gguf_row import Architecture
from quark.torch.export.gguf_table import DECODERS
from quark.torch.export.gguf_tensors import FileLoss, GGUFTensor, Values, entries_of, made_of
from quark.torch.export.gguf_types import FLOATS, TYPES, GGUFTarget, check_types, check_weights_alone
from quark.torch.export.gguf_vocabulary import add_vocabulary
from quark.torch.export.language_part import language_part
from quark.torch.export.model_files import check_merged
from quark.torch.export.original import names_of as outside_names
from quark.torch.export.state import own_tensors
from quark.torch.export.upright import set_upright
from quark.torch.layers import is_transposed
from quark.torch.quantized_layer import quantized_layers
from quark.torch.rotated import refuse_to_export

log = logging.getLogger(__name__)
FLOAT = "F16"
PHI3 = ("<s>", "</s>", "<unk>", "<|endoftext|>")
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 11, "Q4_K": 14,
    "Q5_K": 16, "Q6_K": 18, "BF16": 32, "MXFP4": 38,
}  # fmt: skip


def export_gguf(
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_type: str,
    tokenizer_path: str | os.PathLike[str],
    weight_type: str | None = None,
    float_type: str = FLOAT,
    layer_types: Mapping[str, str] | None = None,
    verify: bool = True,
) -> FileLoss:
    """Write ``<output_dir>/<model_type>.gguf``.

    Args:
        model: of transformers; quantized, or float with ``weight_type``.
        output_dir: made if it is not there.
        model_type: a key of ``ARCHITECTURES``, such as "llama", "qwen3_moe" or "gpt_oss", or a model type whose
            language model has one ("gemma3", "llava"): the file holds that alone.
        tokenizer_path: folder with ``tokenizer.model`` or ``tokenizer.json``.
        weight_type: GGML type of all linear layers that are quantized (of a float model: of all but the output),
            rounded from their values; None: that of their scheme.
        float_type: "F16", "BF16" or "F32", for embeddings and layers that are not quantized.
        layer_types: GGML types of single layers, by name or glob, in the place of ``weight_type``.
        verify: read every tensor back and compare it with what the model computes with, before the file appears;
            without it no loss is measured.

    Returns:
        What the file loses against the values of the model, and the tensors that were kept as F32 because float16
        does not hold their scales.

    Raises:
        ConfigError: a type or scheme that GGUF does not have, or quantized inputs or caches; the tensor is named.
        ModelError: another architecture, a tokenizer that does not fit, rotations or branches that GGUF does not hold.
    """
    types, whole = dict(layer_types or {}), model
    for name, value, allowed in (
        ("float_type", float_type, FLOATS),
        *(("weight_type", kind or "F16", TYPES) for kind in (weight_type, *types.values())),
    ):
        check_name(name, value, allowed)
    refuse_to_export(model)
    check_merged(model)
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) != model_type:
        architecture_of(model_type)
        raise ModelError(f"the model is {getattr(config, 'model_type', None)!r}, not {model_type!r}")
    model = language_part(model, DECODERS)
    config = model.config
    row = row_of(config)
    check_network(config, row)
    slots = ((name, dict(layer.quantizers())) for name, layer in quantized_layers(model))
    check_weights_alone(getattr(whole, "quant_config", None), slots)
    warn_of(whole, model, row)
    if row.encoder and (behind := sorted(one.name for one in Path(tokenizer_path).glob("*_Dense"))):
        log.warning("the file gives hidden states; it is without the layers of sentence-transformers %s", behind)
    target = Path(output_dir) / f"{model_type}.gguf"
    if target.exists():
        raise ConfigError(f"{str(target)!r} already exists; delete it, or export to another folder")
    loss, apart, row = FileLoss(), taken_apart(model), with_numbers(row, model)
    choice = target_of(apart, row, weight_type, types, float_type)
    entries = [*entries_of(apart, tensors_of(apart, row), choice, loss), *factors(config, row), *unread(config, row)]
    with new_folder(output_dir, beside=True) as folder:
        sums = write(folder / target.name, entries, config, row, Path(tokenizer_path), loss if verify else None)
        read_back(folder / target.name, sums)
    tell(loss, target.name)
    return loss


def target_of(
    model: nn.Module, row: Architecture, weight_type: str | None, types: Mapping[str, str], float_type: str
) -> GGUFTarget:
    """What a file is to be made of, of a model whose experts are taken apart."""
    config, is_float = model.config, next(quantized_layers(model), None) is None
    names = names_of(row, config)
    return GGUFTarget(row, config, names, outside_names(model), weight_type, types, float_type, is_float)


def check_before(model: nn.Module, wanted: QConfig, folder: Path) -> None:
    """Refuse, before any work, what a file cannot hold: all but the values of tensors is written to nowhere.

    Args:
        model: float; its tensors need no values, its experts are taken apart.
        wanted: how it will be quantized.
        folder: with its tokenizer.

    Raises:
        ConfigError: a model type that has no row; a scheme, rows or experts that have no type.
        ModelError: a network that llama.cpp computes otherwise, or a tokenizer that it does not have.
    """
    import gguf

    whole, model = model, language_part(model, DECODERS)
    config: Any = model.config
    row = row_of(config)
    check_network(config, row)
    nowhere = gguf.GGUFWriter(None, row.name)  # a file is opened with its header only
    add_numbers(nowhere, config, row)
    add_vocabulary(nowhere, folder, config.vocab_size, config.model_type)
    check_types(model, whole, wanted, tensors_of(model, row), target_of(model, row, None, {}, FLOAT))


def warn_of(whole: nn.Module, model: nn.Module, row: Architecture) -> None:
    """Name what llama.cpp does otherwise with a model that is the language model of a whole one, or that itself."""
    config: Any = model.config
    own = {id(value) for value in model.parameters()}
    beside = {".".join(name.split(".")[:2]) for name, value in whole.named_parameters() if id(value) not in own}
    if left := sorted(name for name, _ in model.named_parameters() if name.startswith(row.left)):
        log.warning("llama.cpp does not compute with %s; the file is without them", ", ".join(left))
    if (length := rope_of(config).get("original_max_position_embeddings")) and long_factors(config):
        log.warning(
            "llama.cpp takes the factors of LongRoPE by the length of its context, transformers by that of the text: "
            "for texts up to %d tokens run it with -c %d", length, length,
        )  # fmt: skip
    if beside:
        log.warning(
            "the file holds the language model alone, without %s: llama.cpp has those in a file of their own (mmproj)",
            ", ".join(sorted(beside)),
        )
    if slides(config) and not row.window:
        log.warning(
            "llama.cpp has no sliding window in %r: beyond %d tokens, which the file tells as its longest text, it "
            "answers otherwise",
            row.name,
            config.sliding_window,
        )


def tell(loss: FileLoss, file: str) -> None:
    """The loss of a file."""
    if loss.rescued:
        log.warning(
            "%s: %d tensors have scales that float16 does not hold, and are kept as F32: %s",
            file, len(loss.rescued), ", ".join(loss.rescued[:6]),
        )  # fmt: skip
    log.info("%s differs from the values that were evaluated by %.2g of their norm", file, loss.relative)


def taken_apart(model: nn.Module) -> nn.Module:
    """A model that shares its tensors with ``model``, with every stacked expert taken apart and every weight as
    [outputs, inputs]."""
    if not any(is_fused(module) or is_transposed(module) for module in model.modules()):
        return model
    kept: dict[int, Any] = {id(value): value for value in (*model.parameters(), *model.buffers())}
    apart = copy.deepcopy(model, kept)
    unfuse_experts(apart)
    set_upright(apart)
    return apart


def tensors_of(model: nn.Module, row: Architecture) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of the state that llama.cpp computes with, without quantizers."""
    tensors = own_tensors(model, dict(quantized_layers(model)))
    return [
        (name, value) for name, value in tensors if not (name.startswith(row.left) or name.endswith(tuple(row.told)))
    ]


def with_numbers(row: Architecture, model: nn.Module) -> Architecture:
    """A row with the numbers of a model that llama.cpp reads as such, one a layer."""
    tensors = dict(own_tensors(model, {}))
    told = {method: [float(value) for name, value in tensors.items() if name.endswith(ending)]
            for ending, method in row.told.items()}  # fmt: skip
    return replace(row, constants={**row.constants, **told})


def names_of(row: Architecture, config: Any) -> tuple[Any, ...]:
    """What the ``gguf`` package makes of names, those of the architecture first."""
    import gguf

    known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    return tuple(
        gguf.get_tensor_name_map(known[name], config.num_hidden_layers) for name in (row.name, row.also) if name
    )


def factors(config: Any, row: Architecture) -> list[GGUFTensor]:
    """The tensors of what frequencies are divided by, where there are any."""
    plain = rope_factors(config, row)
    found = long_factors(config) | ({} if plain is None else {"rope_freqs": plain})
    return [GGUFTensor(f"{name}.weight", "F32", one.shape, partial(made, one)) for name, one in found.items()]


def unread(config: Any, row: Architecture) -> list[GGUFTensor]:
    """Tensors of zeros, for those that llama.cpp wants and does not compute with."""
    shapes = row.unread(config).items()
    kinds = {1: "F32", 2: "Q4_0"}
    return [
        GGUFTensor(f"{name}.weight", kinds[len(shape)], shape, partial(zeros, shape, kinds[len(shape)]))
        for name, shape in shapes
    ]


def zeros(shape: tuple[int, ...], kind: str) -> tuple[np.ndarray, Values]:
    """Zeros as a type."""
    return made_of(partial(np.zeros, shape, np.float32), kind)


def made(values: np.ndarray) -> tuple[np.ndarray, Values]:
    """Data that are their values."""
    return values, lambda: values


def write(
    path: Path, entries: list[GGUFTensor], config: Any, row: Architecture, tokenizer: Path, loss: FileLoss | None
) -> dict[str, int]:
    """The file: metadata, vocabulary, tensors one after the other; each is compared with the model on its way, since
    finding its codes takes longest and is done once.

    Args:
        path: of the file.
        entries: its tensors.
        config: of the model.
        row: the architecture.
        tokenizer: folder.
        loss: what is lost is added here; None: nothing is compared.

    Returns:
        The checksums of the tensors that were compared.

    Raises:
        ModelError: a tensor that does not decode to what the model computes with.
    """
    import gguf

    writer, sums = gguf.GGUFWriter(path, row.name), dict[str, int]()
    try:
        add_metadata(writer, config, row, entries)
        add_vocabulary(writer, tokenizer, config.vocab_size, config.model_type)
        writer.add_name(network_name(config, writer.kv_data[0]["tokenizer.ggml.tokens"].value))
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
            made, values = entry.make()
            data = np.ascontiguousarray(made)
            if loss is not None:
                loss.add(entry, data, values())
                sums[entry.name] = checksum(data)
            writer.write_tensor_data(data)
    finally:
        writer.close()
    return sums


def checksum(data: np.ndarray) -> int:
    """Of the bytes of an array."""
    return crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)


def read_back(path: Path, sums: Mapping[str, int]) -> None:
    """The file holds, as the ``gguf`` package reads it, the bytes that were compared.

    Raises:
        ModelError: a tensor that is missing, or has other bytes.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        """Reads tensors; its views are plain arrays, since one of a memmap is slow, and a vocabulary is passed over."""

        data = property(lambda self: self._plain, lambda self, mapped: setattr(self, "_plain", mapped.view(np.ndarray)))

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if raw_type != gguf.GGUFValueType.ARRAY:
                found: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
                return found
            kind, length = self._get(orig_offs, np.uint32)[0], int(self._get(orig_offs + 4, np.uint64)[0])
            number, end, text = self.gguf_scalar_to_np.get(gguf.GGUFValueType(kind)), orig_offs + 12, self.data.data
            for _ in range(0 if number else length):
                end += 8 + int.from_bytes(text[end : end + 8], "little")
            end += length * np.dtype(number).itemsize if number else 0
            return end - orig_offs, [], [], [gguf.GGUFValueType.ARRAY]

    found = {tensor.name: tensor for tensor in Reader(path).tensors} if sums else {}
    for name, known in sums.items():
        if name not in found:
            raise ModelError(f"the tensor {name!r} is not in the file that was written")
        if checksum(found[name].data) != known:
            raise ModelError(f"the tensor {name!r} has other bytes in the file than were written; nothing was kept")


def add_metadata(writer: Any, config: Any, row: Architecture, entries: list[GGUFTensor]) -> None:
    """What llama.cpp has to know about the network and the file."""
    import gguf

    kinds = [entry.kind for entry in entries if len(entry.shape) > 1 and re.match(r"(enc\.)?blk\.", entry.name)]
    writer.add_file_type(FILE_TYPES[max(set(kinds), key=kinds.count)])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_numbers(writer, config, row)


def network_name(config: Any, tokens: Collection[str]) -> str:
    """The class of the network. Under a name with "phi3" llama.cpp strips the spaces behind special tokens, as Phi-3's
    tokenizer does, and ends its process where one of that tokenizer's tokens is missing."""
    name = str((config.architectures or [config.model_type.title()])[0])
    return name if all(token in tokens for token in PHI3) else name.replace("Phi3", "Phi")
