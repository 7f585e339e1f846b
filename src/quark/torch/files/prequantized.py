"""A folder that somebody has quantized, as the float checkpoint that its codes stand for: tensor by tensor.

    fp8, mxfp8,          weight, weight_scale_inv or like it           codes times scales: ``fp8.py``
    fbgemm_fp8
    awq, gptq            qweight, qzeros, scales, g_idx                scale (code - zero point): ``words.py``
    mxfp4 (gpt_oss)      *_blocks, *_scales                            FP4 under powers of two, stacked experts
    compressed-tensors   weight_packed or weight, weight_scale, ..     decoded by the library
    modelopt             weight, weight_scale, weight_scale_2          FP8, MXFP8, NVFP4: ``export/modelopt.py``
    bitsandbytes         weight, absmax, quant_map, quant_state        NF4, FP4 and int8: ``bitsandbytes.py``
    quark                as we write it                                read by our own import

What was quantized becomes float32, and is read in the type that the model computes in, which ``config.json`` says then,
from files (``skeleton``) as into memory; all other tensors keep their type. Scales of activations and caches are left
behind: a new quantization finds its own. Scales and zero points of weights are kept beside (``carried``), so that a new
grid that holds the values keeps the codes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from quark.files.drafts import naming
from quark.files.folder import new_folder, scratch_beside
from quark.torch.digest import GRIDS
from quark.torch.export.checkpoint import SUFFIX, Checkpoint, method_of, read_checkpoint
from quark.torch.export.declared import float_alone, quantized_already, refuse_method
from quark.torch.export.decoded import Parts
from quark.torch.export.layout import Form
from quark.torch.export.model_files import copy_files
from quark.torch.export.shards import Item, item_of, write_file, write_index
from quark.torch.files.coded import decoding
from quark.torch.files.methods import METHODS, CodedFolder, found_in
from quark.torch.files.restacked import restacked
from quark.torch.files.skeleton import StoredSource, named_type

ENDS = (
    *("weight_scale_inv", "weight_scale", "input_scale", "activation_scale", "qscale_act"),
    *("[kqv]_scale", "[kqv]_zero_point"),
)
LEFT = re.compile(rf"\.({'|'.join(ENDS)}|input_global_scale|input_scale_ub|input_zero_point|output_scale)$")
#: Roles: the scale that a layer is quantized under.
SCALES = ("weight_global_scale", "weight_scale_2", "scales", "weight_scale", "scale")
KEPT = {"scale": torch.float32, "zero_point": torch.int32}


def check_float(folder: Path) -> None:
    """Refuse a folder that is quantized, where only a float one is read.

    Raises:
        ConfigError: it is, or says so in a way that nobody knows.
        ModelError: files that are broken, or codes that nothing describes.
    """
    method = method_of(folder)
    if method is None:
        return
    if method not in ("quark", *METHODS):
        refuse_method(folder / "config.json", method, ["quark", *METHODS])
    if method in METHODS:
        coded_in(read_checkpoint(folder))
    raise quantized_already(folder, method)


def coded_in(checkpoint: Checkpoint) -> CodedFolder:
    """The weights of a folder that are coded.

    Raises:
        ConfigError: what its method does not read.
        ModelError: a damaged description, tensors that do not belong together, or float ones alone.
    """
    found = found_in(checkpoint)
    if not found.taken and not any(map(LEFT.search, found.tensors)):
        raise float_alone(checkpoint.folder, method_of(checkpoint.folder))
    return found


@contextmanager
def as_float(folder: Path, output: Path, loaded: bool = False) -> Iterator[Path]:
    """The folder itself, or the float checkpoint that it stands for, hidden beside ``output`` until the block ends;
    ``loaded``: as ``dequantize_checkpoint``.

    Raises:
        ConfigError: a method that cannot be decoded.
        ModelError: files that are missing or broken.
    """
    if method_of(folder) is None:
        yield folder
        return
    with scratch_beside(output) as made, naming({made / "float": folder}):
        dequantize_checkpoint(folder, made / "float", loaded)
        yield made / "float"


def dequantize_checkpoint(source: Path, target: Path, loaded: bool = False) -> None:
    """Write the float checkpoint that a quantized one stands for.

    Args:
        source: folder with ``config.json`` and safetensors files.
        target: new folder.
        loaded: transformers will load it, which finds no single experts where the original has them stacked.

    Raises:
        ConfigError: a method that cannot be decoded.
        ModelError: files that are missing or broken.
    """
    checkpoint = read_checkpoint(source)
    described: Any = checkpoint.config.get("quantization_config") or {}
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    method = described.get("quant_method")
    if method == "quark":
        with decoding(f"{str(source)!r}, quantized by {method!r},"):
            made = quark_items(source)
        groups, grids = [made[0]], made[1]
    elif isinstance(method, str) and method in METHODS:
        found = coded_in(checkpoint)
        groups, grids = foreign_items(found), grid_items(found)
        if named_type(checkpoint) is None:
            config["dtype"] = str(computed_in(found)).removeprefix("torch.")
    else:
        refuse_method(source / "config.json", method, ["quark", *METHODS])
    with new_folder(target) as draft:
        write(draft, restacked(groups, checkpoint) if loaded else groups)
        write_file(draft / GRIDS, grids)
        copy_files(source, draft)
        (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def computed_in(source: CodedFolder) -> torch.dtype:
    """The type that a folder computes in where its configuration names none: that of its first float tensor."""
    others = (one.dtype for name, one in source.tensors.items() if name not in source.taken and not LEFT.search(name))
    return next((dtype for dtype in others if dtype.is_floating_point), torch.float32)


def write(folder: Path, groups: list[list[Item]]) -> None:
    """A file for each group, and their index."""
    count = len(groups)
    names = [f"model-{k + 1:05d}-of-{count:05d}{SUFFIX}" for k in range(count)] if count > 1 else [f"model{SUFFIX}"]
    for name, items in zip(names, groups, strict=True):
        write_file(folder / name, items)
    if count > 1:
        write_index(folder / f"model{SUFFIX}.index.json", groups, names)


def foreign_items(source: CodedFolder) -> list[list[Item]]:
    """The tensors of each file: those that are coded where their first part is, the others as they are."""
    homes = {next(iter(coded.parts.values())): name for name, coded in source.found.items()}
    groups = []
    for names in source.checkpoint.files.values():
        items = []
        for name in names:
            if name in homes:
                items.append(coded_item(source, homes[name]))
            elif name not in source.taken and not LEFT.search(name):
                items.append(plain_item(source.folder, name, source.tensors[name]))
        groups.append(items)
    return [items for items in groups if items]


def plain_item(folder: Path, name: str, stored: StoredSource) -> Item:
    """A tensor as it is."""
    return Item({name: (stored.shape, stored.dtype)}, lambda: {name: stored.read(folder).contiguous()})


def coded_item(source: CodedFolder, name: str, dtype: torch.dtype = torch.float32) -> Item:
    """A tensor that is decoded."""
    return Item({name: (source.found[name].shape, dtype)}, lambda: {name: source.values(name).to(dtype)})


def grid_items(source: CodedFolder) -> list[Item]:
    """What ``carried`` keeps of the grid of each coded tensor."""
    items = []
    for name, coded in source.found.items():
        told = "blocks" in coded.parts or len(coded.shape) > 2  # by the values, or not at all: a stack has no scale
        scale = next((source.tensors[coded.parts[role]] for role in SCALES if role in coded.parts and not told), None)
        items.append(item_of(name, torch.empty(0)))
        if scale is not None:
            form: Form = {f"{name}.0.{key}": ((prod(scale.shape),), dtype) for key, dtype in KEPT.items()}
            items.append(Item(form, partial(grid_of, source, name)))
    return items


def grid_of(source: CodedFolder, name: str) -> Parts:
    """The scales and zero points of one tensor, flat."""
    parts = source.parts(name)
    with decoding(f"{str(source.folder)!r}: the grid of {name!r}"):
        scale, zeros = source.grid.parameters(name, parts)
        if scale is None:  # values tell the scales of such blocks
            count = next(parts[role].numel() for role in SCALES if role in parts)
            scale = torch.ones(count)
        zeros = torch.zeros(()) if zeros is None else zeros
        made = (scale, zeros.reshape(-1).expand(scale.numel()) if zeros.numel() == 1 else zeros)
        return {
            f"{name}.0.{key}": value.reshape(-1).to(dtype).contiguous()
            for (key, dtype), value in zip(KEPT.items(), made, strict=True)
        }


def quark_items(source: Path) -> tuple[list[Item], list[Item]]:
    """The values of one of our own checkpoints, under the names of the original one, and their grids."""
    from quark.torch.export.original import names_of, outside_items
    from quark.torch.export.reload import own_model
    from quark.torch.export.state import own_tensors
    from quark.torch.export.stored import StoredTensor
    from quark.torch.fake_quantize import parts
    from quark.torch.quantized_layer import quantized_layers

    model = own_model(None, source)
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
