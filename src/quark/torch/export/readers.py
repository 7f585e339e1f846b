"""Which programs read what is about to be written, where nobody said which one it is for.

Those that read the schemes in the format (``format_table.tsv``) are asked about this model, as ``--for`` asks them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import nn

from quark.config.file_formats import PROGRAMS, check_caches, tried, works
from quark.errors import QuarkError
from quark.torch.config.model import QConfig
from quark.torch.export.before_work import check_before_work
from quark.torch.export.gptqmodel_reads import METHODS

NAMES_MODULES = "--for transformers names the modules in the file that it asks for"


def readers(
    model: nn.Module,
    config: QConfig,
    schemes: Sequence[str],
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
        schemes, cache: by name, of its layers and of keys and values.
        format: of the file.
        source: the folder that the model comes from.
    """
    strange = getattr(getattr(model, "config", None), "auto_map", not hasattr(model, "config"))
    if strange or not schemes or not all(scheme in tried() for scheme in schemes):
        return {}
    names = [name for name in PROGRAMS if all(works(scheme, format, name) for scheme in schemes)]
    found = {}
    for name in names:
        try:
            check_caches(cache, format, name)
            check_before_work(model, config, format, name, source)
            found[name] = NAMES_MODULES if format in METHODS and name == "transformers" else ""
        except QuarkError as error:
            found[name] = str(error)
    return found
