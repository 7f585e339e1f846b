"""Whether ``model_type`` and ``architectures`` of a ``config.json`` name one model, as far as transformers knows them.

transformers chooses a model by the first, vLLM by the second, and a class takes any configuration: where they name two,
some program computes another network, and none says so.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from quark.errors import ModelError, nearest
from quark.reading import read_object
from quark.torch.transformers_names import (
    causal_class,
    classes_of,
    config_source,
    has_class,
    model_types,
    type_of_class,
)

log = logging.getLogger(__name__)
GENERATION = "generation_config.json"


def check_named(folder: Path, config: Mapping[str, Any]) -> None:
    """The type is one that transformers has, and the architecture one of that type; code in the folder has any.

    Args:
        folder: of the checkpoint.
        config: its ``config.json``.

    Raises:
        ModelError: a broken generation_config.json, an unknown type, no architecture, or one of another type; the
            field, its value and the usual one are named. An architecture that transformers does not have is warned of,
            as other programs may, unless it is one of its with a slip.
    """
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        return
    if (folder / GENERATION).is_file():  # which transformers reads with the model
        read_object(folder / GENERATION)
    from quark.torch.export.model_files import class_named

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
        raise wrong_type(file, kind, name, taken.model_type, CONFIG_MAPPING)
    known = classes_of(kind)
    if not name:
        raise no_class(file, kind)
    if name in known:
        return
    if own is None:
        if meant := misspelt(name, kind):
            raise no_such_class(file, name, kind, meant)
        log.warning(
            "%s: architectures names %r, which transformers does not have.%s Of the model_type %r it has %s",
            file, name, nearest(name, known), kind, some(known),
        )  # fmt: skip
    elif taken is not None and own.__name__ not in known and not belongs(taken, CONFIG_MAPPING[kind]):
        raise two_models(file, kind, name, taken.model_type)


def misspelt(name: str, kind: str) -> str | None:
    """The class of a type that a name is, but for one slip: a letter too many, too few or wrong, or two exchanged.

    Other digits are another class, and longer names are those of somebody's class that is made of one.
    """
    return next((known for known in classes_of(kind) if is_slip(name.lower(), known.lower())), None)


def is_slip(name: str, known: str) -> bool:
    """Whether one slip makes a name of a known one."""
    begun = alike(name, known)
    ended = alike(name[begun:][::-1], known[begun:][::-1])
    one, other = name[begun : len(name) - ended], known[begun : len(known) - ended]
    few = max(len(one), len(other)) == 1 or (len(one) == 2 and one == other[::-1])
    return few and not any(map(str.isdigit, one + other))


def alike(one: str, other: str) -> int:
    """How many letters two names begin with."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))])


def no_such_class(file: str, name: str, kind: str, meant: str) -> ModelError:
    """What is said of a class that is misspelt."""
    return ModelError(
        f"{file!r}: architectures is [{name!r}], which transformers does not have. Did you mean {meant!r}? Of {kind!r} "
        f"it has {some(classes_of(kind))}"
    )


def two_models(file: str, kind: str, name: str, takes: str) -> ModelError:
    """What is said of a class of another type."""
    return ModelError(
        f"{file!r} names two models: model_type is {kind!r}, and architectures is [{name!r}], a class of {takes!r}; of "
        f"{kind!r} transformers has {some(classes_of(kind))}"
    )


def are_apart(one: str, other: str) -> bool:
    """Whether two types have configurations of which none is the other's kind or part, as far as their source says."""
    sources = [config_source(kind) for kind in (one, other)]
    types = model_types()
    return types.get(one) != types.get(other) and all(source is not None and source.alone for source in sources)


def types_known() -> Any:
    """Model types of transformers, with those that somebody has registered in this process."""
    if "transformers" not in sys.modules:
        return model_types()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING


def check_code(folder: Path, config: Mapping[str, Any], trust_remote_code: bool) -> None:
    """A model that only the folder's own code makes is run where somebody says so.

    Raises:
        ModelError: nobody did.
    """
    if "auto_map" in config and not trust_remote_code and config.get("model_type") not in types_known():
        raise ModelError(
            f"{str(folder)!r} is made by Python code of its own (auto_map of config.json), which is run only with "
            f"trust_remote_code (--trust-remote-code): read it first"
        )


def check_by_names(folder: Path, config: Mapping[str, Any], loaded: bool) -> None:
    """As ``check_named``, as far as the tables of transformers decide it: torch is not loaded, nor transformers.

    Args:
        folder, config: as ``check_named``.
        loaded: transformers loads the model, which needs a type that it has.

    Raises:
        ModelError: as ``check_named``, or a type that transformers cannot load.
    """
    if (folder / GENERATION).is_file():
        read_object(folder / GENERATION)
    types, kind, listed = types_known(), config.get("model_type"), config.get("architectures")
    if not types or "_class_name" in config or "auto_map" in config:
        return
    name, file = str(listed[0]) if isinstance(listed, list) and listed else "", str(folder / "config.json")
    if isinstance(kind, str) and kind in types:
        if not name:
            raise no_class(file, kind)
        takes, known = type_of_class(name), classes_of(kind)
        if takes is not None and name not in known and are_apart(kind, takes):
            raise two_models(file, kind, name, takes)
        if takes is None and (meant := misspelt(name, kind)) and not has_class(name):
            raise no_such_class(file, name, kind, meant)
        return
    if (takes := type_of_class(name)) is not None:
        raise wrong_type(file, kind, name, takes, types)
    if loaded and isinstance(kind, str):
        said = f"{file!r} says that model_type is {kind!r}, which transformers lacks.{nearest(kind, types)}"
        raise ModelError(f"{said} Without its code (auto_map) only `quark torch quantize-files` takes such a folder")


def wrong_type(file: str, kind: object, name: str, takes: str, types: Iterable[str]) -> ModelError:
    """What is said of a type that transformers does not have, or of none, beside a class of another."""
    said = "names no model_type" if kind is None else f"says that model_type is {kind!r}, which transformers lacks"
    likely = "" if kind is None else nearest(str(kind), types)
    return ModelError(f"{file!r} {said}.{likely} {name} takes {takes!r}")


def no_class(file: str, kind: str) -> ModelError:
    """What is said of a type without a class."""
    usual, known = causal_class(kind), classes_of(kind)
    said = f"; {[usual]} is usual" if usual else f"; of {kind!r} transformers has {some(known)}" if known else ""
    return ModelError(f"{file!r} names no architectures, and so tensors cannot be told apart{said}")


def belongs(taken: type, kind: Any) -> bool:
    """Whether what a model takes is a class of configurations, or a part of one."""
    if issubclass(kind, taken) or issubclass(taken, kind):
        return True
    parts = (getattr(kind, "sub_configs", None) or {}).values()
    return any(belongs(taken, part) for part in parts if part is not kind)


def some(names: Iterable[str]) -> str:
    """A few of many names, those of language models first."""
    found = sorted(names, key=lambda name: "CausalLM" not in name)
    return ", ".join(found[:4]) + (f", … ({len(found)} in all)" if len(found) > 4 else "") if found else "none"
