"""What each method's folders hold, by the name that they have in ``quant_method``: the weights that are coded, their
decoders (``METHODS``), and their grids in our words (``GRIDS``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from quark.dataclass import dataclass
from quark.errors import ConfigError, ModelError, unknown
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.export.declared import CODES
from quark.torch.export.decoded import COMPRESSED, Parts, decompressor, in_kernels
from quark.torch.export.modelopt import ALGORITHMS, decoder_of, nvfp4_values
from quark.torch.export.stacked_blocks import block_values
from quark.torch.files import grids
from quark.torch.files.bitsandbytes import bitsandbytes
from quark.torch.files.coded import Coded, Found, Tensors, check_types, decoding
from quark.torch.files.fp8 import fbgemm_grid, fp8, fp8_grid
from quark.torch.files.grids import FolderGrid, of_arguments, scheme_of, told
from quark.torch.files.skeleton import StoredSource, stored_tensors
from quark.torch.files.words import awq, gptq, sharing, words_grid


def mxfp4(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> Found:
    """Stacked experts of gpt_oss: [experts, out, groups, 16] bytes become [experts, in, out]."""
    found = {}
    for name, stored in tensors.items():
        if name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in tensors:
            target = name.removesuffix("_blocks")
            if len(stored.shape) != 4:
                raise ModelError(
                    f"{str(checkpoint.folder)!r}: {name!r} has the shape {list(stored.shape)}; MXFP4 of gpt_oss is "
                    f"read, whose stacked experts are [experts, out, groups, 16]"
                )
            check_types(tensors, {name: (torch.uint8,), f"{target}_scales": (torch.uint8,)})
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

    check_described(described, checkpoint.folder)
    config = QuantizationConfig.model_validate(described)
    found = {}
    for name in tensors:
        if name.endswith(".weight_scale"):
            prefix = name.removesuffix("weight_scale")
            scheme = scheme_of(prefix[:-1], config)
            own = {end: f"{prefix}{end}" for end in COMPRESSED if f"{prefix}{end}" in tensors}
            shape = compressed_shape(tensors, own, scheme, checkpoint)
            check_scales(f"{str(checkpoint.folder)!r}: {name!r}", tensors[name].shape, scheme.weights, shape)
            check_codes(f"{str(checkpoint.folder)!r}: {prefix}weight", tensors, own, scheme.weights)
            exact = nvfp4 if "weight_global_scale" in own else decompressor(scheme, config.format)
            if told(scheme.weights):
                exact = in_kernels(exact, of_arguments(name, scheme.weights, tensors[name].dtype).to_stage().spec)
            found[f"{prefix}weight"] = Coded(shape, own, exact)
    return found


def check_described(described: Mapping[str, Any], folder: Path) -> None:
    """What compressed-tensors stores is in a format that the library decodes, and nothing changes it beside the codes.

    Raises:
        ConfigError: it is not; the field is named.
    """
    from compressed_tensors.compressors import BaseCompressor

    for key, what in BEHIND.items():
        if described.get(key) and not (key == "sparsity_config" and described[key].get("format") == "dense"):
            raise ConfigError(f"{str(folder)!r}: {key} of compressed-tensors ({what}) is not read here")
    groups = [group for group in (described.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    if any((group.get("weights") or {}).get("actorder") == "group" for group in groups):
        raise ConfigError(
            f"{str(folder)!r}: actorder of compressed-tensors is 'group' (inputs in another order), which "
            f"is not read here; 'static' and 'weight' are"
        )
    known = [*map(str, BaseCompressor.registered_names())]
    named = [group["format"] for group in groups if group.get("format")]
    for format in named if len(named) == len(groups) > 0 else [described.get("format"), *named]:
        if format is not None and format not in known:
            raise ConfigError(f"{str(folder)!r}: {unknown('format of compressed-tensors', str(format), known)}")


def check_codes(what: str, tensors: Tensors, own: Mapping[str, str], weights: Any) -> None:
    """A weight beside scales is codes, with the zero points that it says it has.

    Raises:
        ModelError: floats, which programs round while they run; or zero points that are missing.
    """
    stored = tensors[own["weight"]].dtype if "weight" in own else None
    if stored is not None and stored.is_floating_point and stored.itemsize > 1:
        raise ModelError(
            f"{what} is {str(stored).removeprefix('torch.')} beside scales, and not codes: it was saved before it was "
            f"compressed (quantization_status), and programs round it while they run; save it compressed"
        )
    if weights.type == "int" and not weights.symmetric and "weight_zero_point" not in own:
        raise ModelError(f"{what} is not symmetric, and its weight_zero_point is missing")


def check_scales(what: str, given: tuple[int, ...], weights: Any, shape: tuple[int, ...]) -> None:
    """There is a scale for everything that should have one of its own: others would be spread without a word."""
    rows, columns = shape[0], prod(shape[1:])
    strategy, size = str(getattr(weights.strategy, "value", weights.strategy)), weights.group_size or columns
    groups = rows * -(-columns // size)
    wanted = {"tensor": 1, "channel": rows, "group": groups, "tensor_group": groups}
    if strategy == "block" and weights.block_structure:
        wanted["block"] = prod(-(-n // int(k)) for n, k in zip((rows, columns), weights.block_structure, strict=True))
    if prod(given) != wanted.get(strategy, prod(given)):
        raise ModelError(
            f"{what} has the shape {list(given)}; a weight of {list(shape)} by {strategy} needs {wanted[strategy]}"
        )


def nvfp4(parts: Parts) -> torch.Tensor:
    """NVFP4 in float32: the library has bfloat16."""
    scales = {"weight_scale": parts["weight_scale"], "weight_scale_2": 1 / parts["weight_global_scale"].float()}
    return nvfp4_values({"weight": parts["weight_packed"], **scales})


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
        check_types(tensors, {parts["weight"]: (torch.uint8, torch.int8) if packed > 1 else (torch.float8_e4m3fn,)})
        found[f"{prefix}weight"] = Coded((rows, columns * packed), parts, decode)
    return found


BEHIND = {  # of compressed-tensors: what changes values beside the codes
    "transform_config": "rotations that run with the model",
    "sparsity_config": "weights stored without their zeros",
}
METHODS: dict[str, Callable[[Tensors, Mapping[str, Any], Checkpoint], Found]] = {
    "fp8": fp8,
    "mxfp8": fp8,
    "fbgemm_fp8": fp8,
    "awq": awq,
    "gptq": gptq,
    "mxfp4": mxfp4,
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "bitsandbytes": bitsandbytes,
}
Grid = Callable[[Tensors, Mapping[str, Any], Checkpoint], FolderGrid]
GRIDS: dict[str, Grid] = {
    "fp8": fp8_grid,
    "mxfp8": fp8_grid,
    "fbgemm_fp8": fbgemm_grid,
    "gptq": words_grid,
    "awq": words_grid,
    "compressed-tensors": grids.compressed,
    "mxfp4": grids.mxfp4,
    "modelopt": grids.modelopt,
    "bitsandbytes": grids.bitsandbytes,
}


@dataclass(frozen=True)
class CodedFolder:
    """A folder that another program has quantized.

    Attributes:
        checkpoint: its files.
        tensors: what is stored, by name.
        found: the weights that are coded.
    """

    checkpoint: Checkpoint
    tensors: Tensors
    found: Found

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self.checkpoint.folder

    @cached_property
    def taken(self) -> frozenset[str]:
        """Names of the tensors that coded weights are made of."""
        return frozenset(name for coded in self.found.values() for name in coded.parts.values())

    @cached_property
    def grid(self) -> FolderGrid:
        """The grids of the weights.

        Raises:
            ConfigError, ModelError: as ``found_in``.
        """
        described, method = description(self.checkpoint)
        with decoding(f"{str(self.folder)!r}, quantized by {method!r},"):
            return GRIDS[method](self.tensors, described, self.checkpoint)

    def parts(self, name: str) -> Parts:
        """What is stored of a coded weight, by its role."""
        return {role: self.tensors[stored].read(self.folder) for role, stored in self.found[name].parts.items()}

    def values(self, name: str, parts: Parts | None = None) -> torch.Tensor:
        """Its float32 values; of ``parts`` that are read already.

        Raises:
            ModelError: parts that do not fit.
        """
        with decoding(f"{str(self.folder)!r}: {name!r}"):
            coded = self.found[name]
            made = coded.decode(self.parts(name) if parts is None else parts)
            return made.to(torch.float32).reshape(coded.shape).contiguous()


def found_in(checkpoint: Checkpoint) -> CodedFolder:
    """The weights of a folder that are coded.

    Raises:
        ConfigError: what its method does not read.
        ModelError: a description that is damaged, or tensors that do not belong together.
    """
    tensors = stored_tensors(checkpoint)
    described, method = description(checkpoint)
    with decoding(f"{str(checkpoint.folder)!r}, quantized by {method!r},"):
        made = CodedFolder(checkpoint, tensors, METHODS[method](tensors, described, checkpoint))
    if lost := sorted(made.taken - set(tensors)):
        raise ModelError(f"{str(checkpoint.folder)!r} lacks the tensor {lost[0]!r}, a part of a quantized weight")
    if not made.taken and (code := next(filter(CODES.search, sorted(tensors)), None)):
        raise ModelError(f"{str(checkpoint.folder)!r} holds {code!r}, and no weight as {method!r} stores them")
    for name in sorted(tensors.keys() - made.taken):
        check_plain(checkpoint.folder, name, tensors[name])
    return made


def check_plain(folder: Path, name: str, stored: StoredSource) -> None:
    """A weight of codes without the scales that it needs is no float weight."""
    if name.endswith(".weight") and (not stored.dtype.is_floating_point or stored.dtype.itemsize == 1):
        raise ModelError(f"{str(folder)!r}: {name!r} is {stored.dtype}, and what says its scales is missing")


def description(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], str]:
    """How a folder says that it is quantized, and the method."""
    described: Any = checkpoint.config["quantization_config"]
    return described, str(described["quant_method"])
