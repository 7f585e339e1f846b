"""A folder that somebody has quantized, as the float checkpoint that its codes stand for: tensor by tensor.

    fp8                  weight, weight_scale_inv or weight_scale      codes times scales of the tensor, rows or blocks
    awq                  qweight, qzeros, scales                       scale (code - zero point)
    gptq                 qweight, qzeros, scales, g_idx                the same; version 1 lowers zero points by one
    mxfp4 (gpt_oss)      *_blocks, *_scales                            FP4 under powers of two, stacked experts
    compressed-tensors   weight_packed or weight, weight_scale, ..     decoded by the library
    modelopt             weight, weight_scale, weight_scale_2          FP8, MXFP8, NVFP4: ``export/modelopt.py``
    bitsandbytes         weight, absmax, quant_map, quant_state        NF4, FP4 and int8: ``bitsandbytes.py``
    quark                as we write it                                read by our own import

What was quantized becomes float32, so that nothing is rounded before it is quantized again; all other tensors keep
their type. Scales of activations and caches are left behind: a new quantization finds its own. Scales and zero points
of weights are kept beside (``carried``), so that a new grid that holds the values keeps the codes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from quark.errors import ConfigError, ModelError, unknown
from quark.files.drafts import naming
from quark.files.folder import new_folder, scratch_beside
from quark.torch.digest import GRIDS
from quark.torch.export.checkpoint import SUFFIX, Checkpoint, read_checkpoint, weight_files
from quark.torch.export.declared import declared, refuse_method
from quark.torch.export.decoded import COMPRESSED, Parts, awq_values, decompressor, fp8_decoder, gptq_decoder
from quark.torch.export.layout import Form
from quark.torch.export.model_files import copy_files, read_object
from quark.torch.export.modelopt import ALGORITHMS, decoder_of
from quark.torch.export.shards import Item, item_of, write_file, write_index
from quark.torch.export.stacked_blocks import block_values
from quark.torch.files.bitsandbytes import bitsandbytes
from quark.torch.files.coded import Coded, Found, Tensors
from quark.torch.files.grids import GRIDS as KNOWN
from quark.torch.files.grids import FolderGrid, scheme_of
from quark.torch.files.skeleton import StoredSource, stored_tensors

ENDS = ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale", "[kqv]_scale", "[kqv]_zero_point")
LEFT = re.compile(rf"\.({'|'.join(ENDS)}|input_global_scale|input_zero_point|output_scale)$")
WORD = 8  # codes of 4 bits in an int32
#: Roles: the scale that a layer is quantized under.
SCALES = ("weight_global_scale", "weight_scale_2", "scales", "weight_scale", "scale")
KEPT = {"scale": torch.float32, "zero_point": torch.int32}


def method_of(folder: Path) -> str | None:
    """How a folder is quantized; None: it is float.

    Raises:
        ModelError: files that are broken, or codes that nothing describes.
    """
    config = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    names = (
        [name for names in weight_files(folder).values() for name in names] if any(folder.glob(f"*{SUFFIX}")) else []
    )
    found = declared(folder, config, names)
    return None if found is None else str(found.get("quant_method"))


@contextmanager
def as_float(folder: Path, output: Path) -> Iterator[Path]:
    """The folder itself, or the float checkpoint that it stands for, hidden beside ``output`` until the block ends.

    Raises:
        ConfigError: a method that cannot be decoded.
        ModelError: files that are missing or broken.
    """
    if method_of(folder) is None:
        yield folder
        return
    with scratch_beside(output) as made, naming({made / "float": folder}):
        dequantize_checkpoint(folder, made / "float")
        yield made / "float"


def dequantize_checkpoint(source: Path, target: Path) -> None:
    """Write the float checkpoint that a quantized one stands for.

    Args:
        source: folder with ``config.json`` and safetensors files.
        target: new folder.

    Raises:
        ConfigError: a method that cannot be decoded.
        ModelError: files that are missing or broken.
    """
    checkpoint = read_checkpoint(source)
    described: Any = checkpoint.config.get("quantization_config") or {}
    method = described.get("quant_method")
    if method == "quark":
        made = quark_items(source)
        groups, grids = [made[0]], made[1]
    elif method in METHODS:
        tensors = stored_tensors(checkpoint)
        found = METHODS[method](tensors, described, checkpoint)
        groups = foreign_items(checkpoint, found)
        grids = grid_items(checkpoint, found, KNOWN[method](tensors, described, checkpoint))
    else:
        refuse_method(source / "config.json", method, ["quark", *METHODS])
    with new_folder(target) as draft:
        write(draft, groups)
        write_file(draft / GRIDS, grids)
        copy_files(source, draft)
        config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
        (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write(folder: Path, groups: list[list[Item]]) -> None:
    """A file for each group, and their index."""
    count = len(groups)
    names = [f"model-{k + 1:05d}-of-{count:05d}{SUFFIX}" for k in range(count)] if count > 1 else [f"model{SUFFIX}"]
    for name, items in zip(names, groups, strict=True):
        write_file(folder / name, items)
    if count > 1:
        write_index(folder / f"model{SUFFIX}.index.json", groups, names)


def foreign_items(checkpoint: Checkpoint, found: Found) -> list[list[Item]]:
    """The tensors of each file: those that are coded where their first part is, the others as they are."""
    tensors = stored_tensors(checkpoint)
    taken = {name for coded in found.values() for name in coded.parts.values()}
    homes = {next(iter(coded.parts.values())): name for name, coded in found.items()}
    groups = []
    for names in checkpoint.files.values():
        items = []
        for name in names:
            if name in homes:
                items.append(coded_item(checkpoint, homes[name], found[homes[name]], tensors))
            elif name not in taken and not LEFT.search(name):
                items.append(plain_item(checkpoint.folder, name, tensors[name]))
        groups.append(items)
    return [items for items in groups if items]


def plain_item(folder: Path, name: str, stored: StoredSource) -> Item:
    """A tensor as it is."""
    return Item({name: (stored.shape, stored.dtype)}, lambda: {name: stored.read(folder).contiguous()})


def coded_item(checkpoint: Checkpoint, name: str, coded: Coded, tensors: Tensors) -> Item:
    """A tensor that is decoded."""

    def make() -> Parts:
        parts = {role: tensors[stored].read(checkpoint.folder) for role, stored in coded.parts.items()}
        return {name: coded.decode(parts).to(torch.float32).reshape(coded.shape).contiguous()}

    return Item({name: (coded.shape, torch.float32)}, make)


def grid_items(checkpoint: Checkpoint, found: Found, grid: FolderGrid) -> list[Item]:
    """What ``carried`` keeps of the grid of each coded tensor."""
    tensors, items = stored_tensors(checkpoint), []
    for name, coded in found.items():
        told = "blocks" in coded.parts  # by the values
        scale = next((tensors[coded.parts[role]] for role in SCALES if role in coded.parts and not told), None)
        items.append(item_of(name, torch.empty(0)))
        if scale is not None:
            form: Form = {f"{name}.0.{key}": ((prod(scale.shape),), dtype) for key, dtype in KEPT.items()}
            items.append(Item(form, partial(grid_of, checkpoint.folder, name, coded, grid, tensors)))
    return items


def grid_of(folder: Path, name: str, coded: Coded, grid: FolderGrid, tensors: Tensors) -> Parts:
    """The scales and zero points of one tensor, flat."""
    scale, zeros = grid.parameters(name, {role: tensors[one].read(folder) for role, one in coded.parts.items()})
    scale = torch.empty(0) if scale is None else scale
    zeros = torch.zeros(()) if zeros is None else zeros
    made = (scale, zeros.reshape(-1).expand(scale.numel()) if zeros.numel() == 1 else zeros)
    return {
        f"{name}.0.{key}": value.reshape(-1).to(dtype).contiguous()
        for (key, dtype), value in zip(KEPT.items(), made, strict=True)
    }


def quark_items(source: Path) -> tuple[list[Item], list[Item]]:
    """The values of one of our own checkpoints, under the names of the original one, and their grids."""
    from quark.torch.export.original import names_of, outside_items
    from quark.torch.export.reload import import_model_from_safetensors
    from quark.torch.export.state import own_tensors
    from quark.torch.export.stored import StoredTensor
    from quark.torch.fake_quantize import parts
    from quark.torch.quantized_layer import quantized_layers

    model = import_model_from_safetensors(None, source)
    layers, items, grids, names = dict(quantized_layers(model)), [], [], names_of(model)
    for name, value in own_tensors(model, layers):
        path, _, slot = name.rpartition(".")
        quantizer = layers[path]._modules.get(f"{slot}_quantizer") if path in layers else None
        kept = quantizer(value) if isinstance(quantizer, StoredTensor) else value
        items.append(item_of(name, kept.detach().contiguous()))
        if isinstance(quantizer, StoredTensor) and slot == "weight":
            outside = f"{names.layer(path)}.weight"
            grids.append(item_of(outside, torch.empty(0)))
            for number, part in enumerate(parts(quantizer.quantizer(value))):
                given = ((key, getattr(part, key)) for key in KEPT)
                grids += [
                    item_of(f"{outside}.{number}.{key}", one.reshape(-1)) for key, one in given if one is not None
                ]
    return list(outside_items(items, names)), grids


def sharing(tensors: Tensors, ends: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """(prefix, stored name by end) of the layers that have tensors with all of these ends."""
    for name in tensors:
        if name.endswith(f".{ends[0]}"):
            prefix = name.removesuffix(ends[0])
            missing = [end for end in ends if f"{prefix}{end}" not in tensors]
            if missing:
                raise ModelError(f"{name!r} is there without {prefix + missing[0]!r}")
            yield prefix, {end: f"{prefix}{end}" for end in ends}


def fp8(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> Found:
    """FP8 weights under scales of the tensor, of rows, or of blocks."""
    size, found = described.get("weight_block_size"), {}
    for name, stored in tensors.items():
        scale = next((f"{name}{end}" for end in ("_scale_inv", "_scale") if f"{name}{end}" in tensors), None)
        if scale is not None and stored.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            blocks = tuple(size) if size else None
            found[name] = Coded(stored.shape, {"weight": name, "scale": scale}, fp8_decoder(blocks))
    return found


def awq(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> Found:
    """4-bit codes in the order of AWQ."""
    if described.get("bits") != 4 or described.get("version", "gemm") != "gemm":
        raise ConfigError("quant_method 'awq': only bits=4 and version='gemm' can be read")

    return {
        f"{prefix}weight": Coded(transposed(tensors[parts["qweight"]]), parts, awq_values)
        for prefix, parts in sharing(tensors, ("qweight", "qzeros", "scales"))
    }


def transposed(stored: StoredSource) -> tuple[int, ...]:
    """[out, in] of AWQ's words [in, out / 8]."""
    rows, words = stored.shape
    return words * WORD, rows


def gptq(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> Found:
    """Codes of 2 to 8 bits as a stream along the inputs."""
    bits, lowered = int(described["bits"]), int(described.get("checkpoint_format", "gptq") != "gptq_v2")

    found = {}
    for prefix, parts in sharing(tensors, ("qweight", "qzeros", "scales", "g_idx")):
        words, rows = tensors[parts["qweight"]].shape
        found[f"{prefix}weight"] = Coded((rows, words * 32 // bits), parts, gptq_decoder(bits, lowered))
    return found


def mxfp4(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> Found:
    """Stacked experts of gpt_oss: [experts, out, groups, 16] bytes become [experts, in, out]."""
    found = {}
    for name, stored in tensors.items():
        if name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in tensors:
            target = name.removesuffix("_blocks")
            experts, rows, groups, half = stored.shape
            shape = (experts, groups * half * 2, rows)
            found[target] = Coded(shape, {"blocks": name, "scales": f"{target}_scales"}, mxfp4_values)
    return found


def mxfp4_values(parts: Parts) -> torch.Tensor:
    """What transformers has in memory of a stack."""
    return block_values(parts).transpose(1, 2)


def compressed_tensors(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> Found:
    """What the library compressed-tensors decodes, layer by layer."""
    from compressed_tensors.quantization import QuantizationConfig

    for key, what in BEHIND.items():
        if described.get(key):
            raise ConfigError(f"{str(checkpoint.folder)!r}: {key} of compressed-tensors ({what}) is not read here")
    config = QuantizationConfig.model_validate(described)
    found = {}
    for name in tensors:
        if name.endswith(".weight_scale"):
            prefix = name.removesuffix("weight_scale")
            scheme = scheme_of(prefix[:-1], config)
            own = {end: f"{prefix}{end}" for end in COMPRESSED if f"{prefix}{end}" in tensors}
            shape = compressed_shape(tensors, own, scheme, checkpoint)
            found[f"{prefix}weight"] = Coded(shape, own, decompressor(scheme, config.format))
    return found


def compressed_shape(tensors: Tensors, own: Mapping[str, str], scheme: Any, checkpoint: Checkpoint) -> tuple[int, ...]:
    """The shape of a weight."""
    if "weight_shape" in own:
        return tuple(int(size) for size in tensors[own["weight_shape"]].read(checkpoint.folder))
    if "weight" in own:
        return tensors[own["weight"]].shape
    rows, length = tensors[own["weight_packed"]].shape
    return rows, length * 8 // int(scheme.weights.num_bits)


def modelopt(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> Found:
    """What ModelOpt's algorithms have written that have a decoder here; others are refused by their names."""
    algorithm = str(described.get("quant_algo"))
    known = [name for name, _ in ALGORITHMS.values()]
    if algorithm not in known:
        raise ConfigError(f"{str(checkpoint.folder)!r}: {unknown('quant_algo of ModelOpt', algorithm, known)}")
    roles, decode = decoder_of(algorithm)
    found = {}
    for prefix, parts in sharing(tensors, (roles[-1], *roles[:-1])):
        if f"{prefix}pre_quant_scale" in tensors:
            raise ConfigError(
                f"{str(checkpoint.folder)!r}: {prefix + 'pre_quant_scale'!r} scales inputs (AWQ of ModelOpt)"
            )
        rows, columns = tensors[parts["weight"]].shape
        packed = 2 if algorithm.endswith("NVFP4") else 1
        found[f"{prefix}weight"] = Coded((rows, columns * packed), parts, decode)
    return found


BEHIND = {  # of compressed-tensors: what changes values beside the codes
    "transform_config": "rotations that run with the model",
    "sparsity_config": "weights stored without their zeros",
}
METHODS: dict[str, Callable[[Tensors, Mapping[str, Any], Checkpoint], Found]] = {
    "fp8": fp8,
    "awq": awq,
    "gptq": gptq,
    "mxfp4": mxfp4,
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "bitsandbytes": bitsandbytes,
}
