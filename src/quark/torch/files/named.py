"""Whether ``model_type`` and ``architectures`` of a ``config.json`` name one model, as far as transformers knows them.

transformers chooses a model by the first, vLLM by the second, and a class takes any configuration: where they name two,
some program computes another network, and none says so.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quark.errors import ModelError, nearest
from quark.torch.export.model_files import class_named, read_object

log = logging.getLogger(__name__)
GENERATION = "generation_config.json"


def check_named(folder: Path, config: Mapping[str, Any]) -> None:
    """The type is one that transformers has, and the architecture one of that type; code in the folder has any.

    Args:
        folder: of the checkpoint.
        config: its ``config.json``.

    Raises:
        ModelError: a broken generation_config.json, an unknown type, no architecture, or one of another type; the
            field, its value and the usual one are named. An architecture that transformers does not have is warned of:
            other programs may.
    """
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        return
    if (folder / GENERATION).is_file():  # which transformers reads with the model
        read_object(folder / GENERATION)
    kind, listed = config.get("model_type"), config.get("architectures")
    name = str(listed[0]) if isinstance(listed, list) and listed else ""
    own, file = class_named(name), str(folder / "config.json")
    taken: Any = inspect.getattr_static(own, "config_class", None)  # classes that lack a library raise for attributes
    taken = taken if isinstance(taken, type) else None
    if "auto_map" in config or "_class_name" in config or (taken is not None and taken.model_type == kind):
        return
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if taken is None:  # neither is known: a model of somebody else's
            return
        said = "names no model_type" if kind is None else f"says that model_type is {kind!r}, which transformers lacks"
        likely = "" if kind is None else nearest(str(kind), CONFIG_MAPPING)
        raise ModelError(f"{file!r} {said}.{likely} {name} takes {taken.model_type!r}")
    classes = classes_of(kind)
    if not name:
        usual = usual_class(kind)
        said = (
            f"; {[usual]} is usual" if usual else f"; of {kind!r} transformers has {some(classes)}" if classes else ""
        )
        raise ModelError(f"{file!r} names no architectures, and so tensors cannot be told apart{said}")
    if name in classes:
        return
    elif own is None:
        log.warning(
            "%s: architectures names %r, which transformers does not have.%s Of the model_type %r it has %s",
            file, name, nearest(name, classes), kind, some(classes),
        )  # fmt: skip
    elif taken is not None and own.__name__ not in classes and not belongs(taken, CONFIG_MAPPING[kind]):
        raise ModelError(
            f"{file!r} names two models: model_type is {kind!r}, and architectures is [{name!r}], a class of "
            f"{taken.model_type!r}; of {kind!r} transformers has {some(classes)}"
        )


def belongs(taken: type, kind: Any) -> bool:
    """Whether what a model takes is a class of configurations, or a part of one."""
    if issubclass(kind, taken) or issubclass(taken, kind):
        return True
    parts = (getattr(kind, "sub_configs", None) or {}).values()
    return any(belongs(taken, part) for part in parts if part is not kind)


def classes_of(kind: str) -> list[str]:
    """The classes of models that transformers has of a type."""
    from transformers.models.auto import modeling_auto

    tables = (table for name, table in vars(modeling_auto).items() if re.fullmatch("MODEL_.*MAPPING_NAMES", name))
    found = (table.get(kind) or () for table in tables)
    return sorted({one for names in found for one in ([names] if isinstance(names, str) else names)})


def usual_class(kind: str) -> str | None:
    """The language model of a type, if transformers has one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    found = KNOWN.get(kind)
    return found if found is None or isinstance(found, str) else str(found[0])


def some(names: Iterable[str]) -> str:
    """A few of many names, those of language models first."""
    found = sorted(names, key=lambda name: "CausalLM" not in name)
    return ", ".join(found[:4]) + (f", … ({len(found)} in all)" if len(found) > 4 else "") if found else "none"
