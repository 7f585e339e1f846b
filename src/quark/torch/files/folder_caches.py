"""The quantized cache of a folder: whether it has one (``cache_of``), and that of compressed-tensors in our words.

<attention>.k_scale [1] or [heads, 1, 1]    →    <attention>.k_proj.output_scale, one number or one per channel

The programs that these folders are for quantize keys behind the rotary embedding, and so does the model that is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.dataclass import dataclass
from quark.errors import ModelError, as_a
from quark.reading import read_object
from quark.torch.config import specs
from quark.torch.config.model import QLayerConfig
from quark.torch.config.type import ScaleType
from quark.torch.export.checkpoint import SUFFIX, Checkpoint, weight_files
from quark.torch.export.declared import declared
from quark.torch.export.decoded import strategy_of
from quark.torch.export.original import names_of
from quark.torch.export.reader_scales import SCALE_TYPES
from quark.torch.files.grids import refuse
from quark.torch.files.skeleton import StoredSource, stored_tensors
from quark.torch.kv_cache import argument_of, head_size, role_of
from quark.torch.layers import kind_of
from quark.torch.template_reading import read_modules


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
    names, tensors = names_of(model), stored_tensors(checkpoint)
    layers, made = {}, {}
    for path, module, role in cached_layers(model):
        block = path.rpartition(".")[0]
        outside, size = names.layer(path), head_size(model, block) if per_head else 1
        for number, own in enumerate(role):
            beside = f"{outside}.{own}_scale"  # where ModelOpt has it
            name = beside if beside in tensors else f"{outside.rpartition('.')[0]}.{own}_scale"
            count = heads_in(model, module, size, len(role)) if per_head else 1
            kept = scale_in(checkpoint.folder, tensors, name, count)
            scale = kept.float()
            scale = scale.repeat_interleave(size) if per_head else scale[0]
            made[f"{outside}.output_scale{'_2' * number}"] = scale
            if key[:2] == INT8:
                made[f"{outside}.output_zero_point{'_2' * number}"] = torch.zeros_like(scale, dtype=torch.int32)
        spec = replace(KNOWN[key].to_quantization_spec(), scale_type=SCALE_TYPES.get(kept.dtype, ScaleType.float))
        layers[path] = QLayerConfig(output_tensors=spec)
    if not layers:
        refuse("kv_cache_scheme is given, and no layer of the model makes keys or values")
    fields = {"kv_cache_quant_config": layers, "kv_cache_per_head": per_head, "kv_cache_post_rope": True}
    return FolderCaches(fields, made)


def cached_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """(name, layer, what of keys and values it makes) of the layers behind the caches of a model: where several of an
    attention module make keys (as DeepSeek's), the last one."""
    globs, last = read_modules(model).kv, {}
    for path, module in model.named_modules():
        block = path.rpartition(".")[0]
        made = kind_of(module) is not None and any(fnmatchcase(path, glob) for glob in globs)
        if made and argument_of(model.get_submodule(block)):
            last.update({(block, role): path for role in role_of(path)})
    for path in dict.fromkeys(last.values()):
        yield path, model.get_submodule(path), tuple(role for (_, role), own in last.items() if own == path)


def heads_in(model: nn.Module, layer: nn.Module, size: int, roles: int) -> int:
    """The heads of keys, or of values, that a layer makes; one that makes both makes queries, too, as a rule."""
    library: Any = model
    own = int(as_a(nn.Linear, layer).out_features) // size
    return own if roles == 1 else int(library.config.get_text_config(decoder=True).num_key_value_heads)


def scale_in(folder: Path, tensors: Mapping[str, StoredSource], name: str, count: int) -> torch.Tensor:
    """A scale of keys or values, [count]."""
    if name not in tensors:
        raise ModelError(f"{str(folder)!r} has a kv_cache_scheme and lacks {name!r}")
    found = tensors[name].read(folder)
    if found.numel() != count:
        raise ModelError(f"{str(folder)!r}: {name!r} has {found.numel()} values, and the model has {count} for it")
    return found.reshape(-1)


ENTRIES = ("kv_cache_scheme", "kv_cache_quant_config", "kv_cache_quant_algo")
WORDS = ("FP8", "static")  # of ModelOpt and of quant_method "fp8": one static scale for keys, and for values
FP8, INT8 = ("float", 8), ("int", 8)
KNOWN = {  # type, bits, strategy, symmetric, dynamic
    (*FP8, "tensor", True, False): specs.FP8E4M3PerTensorSpec(scale_type="float"),
    (*FP8, "attn_head", True, False): specs.FP8E4M3PerChannelSpec(-1),
    (*INT8, "tensor", True, False): specs.Int8PerTensorSpec(),
    (*INT8, "attn_head", True, False): specs.Int8PerChannelSpec(-1, True),
}
