"""The quantized cache of a folder: whether it has one (``cache_of``), and that of compressed-tensors in our words.

<attention>.k_scale [1] or [heads, 1, 1]    →    <attention>.k_proj.output_scale, one number or one per channel
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.errors import ModelError
from quark.torch.config import specs
from quark.torch.config.model import QLayerConfig
from quark.torch.export.checkpoint import SUFFIX, Checkpoint, weight_files
from quark.torch.export.declared import declared
from quark.torch.export.model_files import read_object
from quark.torch.export.original import names_of
from quark.torch.files.grids import refuse, strategy_of
from quark.torch.files.skeleton import StoredSource, stored_tensors
from quark.torch.kv_cache import argument_of, head_size, role_of
from quark.torch.layers import kind_of


@dataclass(frozen=True)
class FolderCaches:
    """What a folder says about its cache.

    Attributes:
        fields: of the configuration of the model.
        tensors: our own, by their names outside.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


def cache_of(folder: Path) -> str | None:
    """What ``--kv-cache`` has to say for a cache like the one that a folder has quantized; None: its cache is float.

    Configurations say it under many names; static scales lie beside the layers, or the attention, that they are of.
    """
    path = folder / "config.json"
    config = read_object(path) if path.is_file() and any(folder.glob(f"*{SUFFIX}")) else {}
    names = [name for names in weight_files(folder).values() for name in names] if config else []
    described = declared(folder, config, names)
    if described is None:
        return None
    said = [described[key] for key in ENTRIES if described.get(key)]
    if not said and not any(is_cache_scale(name) for name in names):
        return None
    text = str(said)
    per_head = bool(described.get("kv_cache_per_head")) or "attn_head" in text
    return "fp8_per_head" if per_head else "int8" if "int8" in text else "fp8"


def is_cache_scale(name: str) -> bool:
    """Whether a stored tensor is a scale of keys or values."""
    owner, _, own = name.rpartition(".")
    return own in ("k_scale", "v_scale") or (own.startswith("output_scale") and bool(role_of(owner)))


def caches_in(model: nn.Module, checkpoint: Checkpoint) -> FolderCaches:
    """The quantized cache of a folder; nothing where it is float.

    Raises:
        ConfigError: a scheme that none of ours is.
        ModelError: a scale that the folder lacks, or of another shape.
    """
    described: Any = checkpoint.config["quantization_config"]
    if not described.get("kv_cache_scheme"):
        return FolderCaches()
    from compressed_tensors.quantization import QuantizationArgs

    said = described["kv_cache_scheme"]
    if isinstance(said, str) and said not in WORDS:
        refuse(f"kv_cache_scheme is {said!r}, and {' and '.join(map(repr, WORDS))} are known")
    scheme = QuantizationArgs.model_validate({"type": "float", "num_bits": 8} if isinstance(said, str) else said)
    key = scheme.type, int(scheme.num_bits), strategy_of(scheme), bool(scheme.symmetric), bool(scheme.dynamic)
    if key not in KNOWN:
        refuse(f"kv_cache_scheme is {scheme.type} of {scheme.num_bits} bits per {strategy_of(scheme)}")
    per_head = strategy_of(scheme) == "attn_head"
    output = QLayerConfig(output_tensors=KNOWN[key].to_quantization_spec())
    names, tensors = names_of(model), stored_tensors(checkpoint)
    layers, made = {}, {}
    for path, module in model.named_modules():
        block, role = path.rpartition(".")[0], role_of(path)
        if kind_of(module) is None or len(role) != 1 or not argument_of(model.get_submodule(block)):
            continue
        outside, count = names.layer(path), 1
        if per_head:
            count = int(module.out_features) // head_size(model, block)
        beside = f"{outside}.{role[0]}_scale"  # where ModelOpt has it
        name = beside if beside in tensors else f"{outside.rpartition('.')[0]}.{role[0]}_scale"
        scale = scale_in(checkpoint.folder, tensors, name, count)
        layers[path] = output
        made[f"{outside}.output_scale"] = (
            scale.repeat_interleave(head_size(model, block)) if per_head else scale.reshape(())
        )
    if not layers:
        refuse("kv_cache_scheme is given, and no layer of the model makes keys or values alone")
    return FolderCaches({"kv_cache_quant_config": layers, "kv_cache_per_head": per_head}, made)


def scale_in(folder: Path, tensors: Mapping[str, StoredSource], name: str, count: int) -> torch.Tensor:
    """A scale of keys or values, [count]."""
    if name not in tensors:
        raise ModelError(f"{str(folder)!r} has a kv_cache_scheme and lacks {name!r}")
    found = tensors[name].read(folder)
    if found.numel() != count:
        raise ModelError(f"{str(folder)!r}: {name!r} has {found.numel()} values, and the model has {count} for it")
    return found.float().reshape(-1)


ENTRIES = ("kv_cache_scheme", "kv_cache_quant_config", "kv_cache_quant_algo")
WORDS = ("FP8", "static")  # of ModelOpt and of quant_method "fp8": one static scale for keys, and for values
FP8 = "float", 8
KNOWN = {  # type, bits, strategy, symmetric, dynamic
    (*FP8, "tensor", True, False): specs.FP8E4M3PerTensorSpec(scale_type="float"),
    (*FP8, "attn_head", True, False): specs.FP8E4M3PerChannelSpec(-1),
}
