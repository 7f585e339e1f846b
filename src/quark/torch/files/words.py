"""Folders of GPTQ and AWQ: integers packed into words of 32 bits, scale (code - zero point).

    GPTQ   qweight [in x bits / 32, out], qzeros [groups, out x bits / 32], scales [groups, out], g_idx [in]
    AWQ    qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]; 4 bits, in an order of its own

The bits of a GPTQ layer are those of its tensors, since folders may mix them ("dynamic"). Layouts that only one kernel
reads (marlin, planar, gemv, ..) are refused: in this one they would be other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from quark.errors import ConfigError, ModelError, unknown
from quark.numerics.packing import AWQ_ORDER, unpack
from quark.torch.config.model import QLayerConfig
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.export.decoded import Decoder, Parts, awq_values, gptq_decoder
from quark.torch.export.gptq import VERSIONS
from quark.torch.files.coded import Coded, Found, Tensors, check_types
from quark.torch.files.grids import FolderGrid, Parameters, integers, refuse

WORD = 32
WIDTHS = (2, 3, 4, 8)
LAYOUT = ("checkpoint_format", "format", "version")  # entries that name how words are made
NO_UNSIGNED = (3,)  # widths that have a signed type only


def sharing(tensors: Tensors, ends: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """(prefix, stored name by end) of the layers that have tensors with all of these ends."""
    for name in tensors:
        if name.endswith(f".{ends[0]}"):
            prefix = name.removesuffix(ends[0])
            missing = [end for end in ends if f"{prefix}{end}" not in tensors]
            if missing:
                raise ModelError(f"{name!r} is there without {prefix + missing[0]!r}")
            yield prefix, {end: f"{prefix}{end}" for end in ends}


def layout_in(described: Mapping[str, Any], known: tuple[str, ...], folder: Path) -> str:
    """The layout that a description names, the first of ``known`` where it names none.

    Raises:
        ConfigError: another one.
    """
    said = [str(described[key]).lower() for key in LAYOUT if described.get(key) is not None]
    said += ["marlin"] * bool(described.get("is_marlin_format"))
    said += ["llm-awq"] * (described.get("backend") == "llm-awq")  # which names a layout, not a kernel
    if wrong := [one for one in said if one not in known]:
        what = f"layout of {described.get('quant_method')}"
        raise ConfigError(f"{str(folder)!r}: {unknown(what, wrong[0], known)}; other ones are not read")
    return said[0] if said else known[0]


def check_shapes(tensors: Tensors, parts: Mapping[str, str], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """The tensors of a layer have the shapes that belong together, and words are words.

    Raises:
        ModelError: one has not, or is of another type.
    """
    check_types(tensors, {parts[role]: (torch.int32,) for role in ("qweight", "qzeros")})
    for role, shape in wanted.items():
        if tensors[parts[role]].shape != shape:
            raise ModelError(
                f"{parts[role]!r} has the shape {list(tensors[parts[role]].shape)}, and its layer needs {list(shape)}"
            )


# ---- AWQ -------------------------------------------------------------------------------------------------------------


def awq(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> Found:
    """4-bit codes in the order of AWQ."""
    layout_in(described, ("gemm",), checkpoint.folder)
    bits = described.get("bits", described.get("w_bit"))
    if bits != 4:
        raise ConfigError(f"{str(checkpoint.folder)!r}: bits of AWQ is 4, not {bits!r}")
    found = {}
    for prefix, parts in sharing(tensors, ("qweight", "qzeros", "scales")):
        columns, words = tensors[parts["qweight"]].shape
        groups = tensors[parts["scales"]].shape[0]
        check_shapes(tensors, parts, {"qzeros": (groups, words), "scales": (groups, words * WORD // 4)})
        if groups < 1 or columns % groups:
            raise ModelError(f"{parts['scales']!r} has {groups} groups, which do not divide {columns} inputs")
        found[f"{prefix}weight"] = Coded((words * WORD // 4, columns), parts, awq_values)
    return found


# ---- GPTQ ------------------------------------------------------------------------------------------------------------


def gptq(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> Found:
    """Codes of 2 to 8 bits as a stream along the inputs."""
    lowered = lowers(described, checkpoint.folder)
    found = {}
    for prefix, parts in sharing(tensors, ("qweight", "qzeros", "scales", "g_idx")):
        bits, columns = width_of(parts, tensors), tensors[parts["g_idx"]].shape[0]
        said = int(described.get("bits", bits))
        if bits != said and not described.get("dynamic"):
            raise ModelError(f"{parts['qweight']!r} holds codes of {bits} bits, and config.json says bits={said}")
        rows, groups = tensors[parts["qweight"]].shape[1], tensors[parts["scales"]].shape[0]
        check_shapes(tensors, parts, {"qzeros": (groups, rows * bits // WORD), "scales": (groups, rows)})
        found[f"{prefix}weight"] = Coded((rows, columns), parts, checked(bits, lowered, parts))
    return found


def lowers(described: Mapping[str, Any], folder: Path) -> int:
    """By how much stored zero points are lowered."""
    return VERSIONS[layout_in(described, tuple(VERSIONS), folder)]


def width_of(parts: Mapping[str, str], tensors: Tensors) -> int:
    """Bits of the codes of a layer.

    Raises:
        ModelError: none of ``WIDTHS``.
    """
    words, columns = tensors[parts["qweight"]].shape[0], tensors[parts["g_idx"]].shape[0]
    found = next((bits for bits in WIDTHS if words * WORD == bits * columns), None)
    if found is None:
        raise ModelError(
            f"{parts['qweight']!r} has {words} words for {columns} inputs, and codes have {', '.join(map(str, WIDTHS))}"
            f" bits"
        )
    return found


def checked(bits: int, lowered: int, names: Mapping[str, str]) -> Decoder:
    """The values of a layer whose groups are there; version 1 has no zero point 0.

    Programs that lower it write other codes, and programs that read these take them for 0 or for one above the largest.
    """
    decode, top = gptq_decoder(bits, lowered), (1 << bits) - 1

    def values(parts: Parts) -> torch.Tensor:
        zeros = unpack(parts["qzeros"].contiguous().view(torch.uint8), bits, parts["scales"].shape[1], "low")
        if lowered and bool((zeros == top).any()):
            raise ModelError(
                f"{names['qzeros']!r} holds {top}, which programs read as the zero point 0 or {top + 1}: version 1 of "
                f"GPTQ has no zero point 0; write the folder with checkpoint_format 'gptq_v2'"
            )
        groups, index = parts["scales"].shape[0], parts["g_idx"]
        if bool(((index < 0) | (index >= groups)).any()):
            raise ModelError(f"{names['g_idx']!r} names groups that are none of its {groups}")
        return decode(parts)

    return values


# ---- the grid --------------------------------------------------------------------------------------------------------


def words_grid(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> FolderGrid:
    """Integers in groups; symmetric where every zero point of the folder is the middle."""
    is_gptq = described["quant_method"] == "gptq"
    lowered = lowers(described, checkpoint.folder) if is_gptq else 0

    def width(name: str) -> int:
        prefix = name.removesuffix("weight")
        return width_of({role: f"{prefix}{role}" for role in ("qweight", "g_idx")}, tensors) if is_gptq else 4

    def zeros(name: str, qzeros: torch.Tensor, rows: int) -> torch.Tensor:
        stream, order = qzeros.contiguous().view(torch.uint8), None if is_gptq else AWQ_ORDER
        return unpack(stream, width(name), rows, "low", order).to(torch.int32).T + lowered

    def all_middle() -> bool:
        for name, stored in tensors.items():
            if name.endswith(".qzeros"):
                weight = f"{name.removesuffix('qzeros')}weight"
                rows = tensors[f"{name.removesuffix('qzeros')}scales"].shape[1]
                if not bool((zeros(weight, stored.read(checkpoint.folder), rows) == middle(width(weight))).all()):
                    return False
        return True

    symmetric = all_middle()

    def config(name: str, read: Callable[[], Parts]) -> QLayerConfig:
        parts = read()
        columns = parts["g_idx"].shape[0] if is_gptq else parts["qweight"].shape[0]
        groups = parts["scales"].shape[0]
        size = columns if groups == 1 else -(-columns // groups)
        if is_gptq and not torch.equal(parts["g_idx"].long(), torch.arange(columns) // size):
            refuse(f"{name!r} has its inputs in another order (desc_act)")
        whole = groups == 1 and int(described.get("group_size", -1)) in (-1, 0)
        signed = symmetric or width(name) in NO_UNSIGNED
        return QLayerConfig(
            weight=integers(width(name), None if whole else size, symmetric, parts["scales"].dtype, signed)
        )

    def parameters(name: str, parts: Parts) -> Parameters:
        shift = middle(width(name)) if symmetric or width(name) in NO_UNSIGNED else 0
        return parts["scales"].T, zeros(name, parts["qzeros"], parts["scales"].shape[1]) - shift

    return FolderGrid(config, parameters)


def middle(bits: int) -> int:
    """The zero point of symmetric codes."""
    return 1 << bits - 1
