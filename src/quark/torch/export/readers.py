"""Which programs read what is about to be written, where nobody said which one it is for.

Those that read the schemes in the format (``format_table.tsv``) are asked about this model, as ``--for`` asks them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from quark.config.file_formats import PROGRAMS, check_caches, works
from quark.errors import QuarkError
from quark.torch.config.model import QConfig
from quark.torch.config.schemes import names_like
from quark.torch.export.before_work import check_before_work
from quark.torch.export.checkpoint import read_checkpoint
from quark.torch.export.gptqmodel_reads import METHODS
from quark.torch.export.huggingface import config_of
from quark.torch.export.model_files import float_dtype
from quark.torch.export.stacked_blocks import takes_turns

NAMES_MODULES = "--for transformers names the modules in the file that it asks for"
JOINS_ROWS = "--for vllm writes gate and up of experts whose rows take turns as the one tensor that it reads"


def readers(
    model: nn.Module,
    config: QConfig,
    schemes: Sequence[Sequence[str]],
    cache: str | None,
    format: str,
    source: str | os.PathLike[str],
) -> dict[str, str]:
    """Program → why it does not read this file, "" for those that do; none of a scheme that is in no table, or of a
    model that code of its folder makes: nobody has seen it there.

    A reader may cast scales to another type; with ``--for`` those are evaluated.

    Args:
        model: float, or a skeleton.
        config: how it will be quantized.
        schemes: of its layers; of each the names that it has, for files do not say which of them it was.
        cache: of keys and values, by name.
        format: of the file.
        source: the folder that the model comes from.
    """
    strange = getattr(getattr(model, "config", None), "auto_map", not hasattr(model, "config"))
    if strange or not schemes:
        return {}
    names = [name for name in PROGRAMS if all(any(works(one, format, name) for one in known) for known in schemes)]
    found = {}
    for name in names:
        try:
            check_caches(cache, format, name)
            check_before_work(model, config, format, name, source)
            found[name] = unasked(model, format, name)
        except QuarkError as error:
            found[name] = str(error)
    return found


def unasked(model: nn.Module, format: str, program: str) -> str:
    """Why a program does not read a file that it reads if it is named; "": it does."""
    if format in METHODS and program == "transformers":
        return NAMES_MODULES
    return JOINS_ROWS if (format, program) == ("quark", "vllm") and any(map(takes_turns, model.modules())) else ""


def schemes_in(model: nn.Module) -> list[list[str]]:
    """The schemes of the layers of a quantized model: of each kind of layers the names that it may have."""
    config = config_of(model)
    layers = (config.global_quant_config, *config.layer_quant_config.values())
    return [names_like(one) for one in layers if one is not None and any(one.stages("weight"))]


def readers_of_codes(model: nn.Module, cache: str | None, format: str, source: str | Path) -> dict[str, str]:
    """As ``readers``, of a quantized model whose codes are written as they are; arguments as there."""
    bare = skeleton_of(model, source)
    return {} if bare is None else readers(bare, config_of(model), schemes_in(model), cache, format, source)


def skeleton_of(model: nn.Module, source: str | Path) -> nn.Module | None:
    """A model that was read from a folder, float and without values; None: transformers does not have it."""
    from quark.torch.files.skeleton import architecture_of

    return architecture_of(read_checkpoint(source), buffers=False, eager=False, dtype=float_dtype(model))
