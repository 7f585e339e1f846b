"""Whether ``config.json`` fits the tensors of its folder: what shapes alone do not show, and errors of transformers as
sentences that name the field."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from quark.errors import ModelError, QuarkError
from quark.torch.template_reading import word_embeddings

LAYERS = re.compile(r"(^|_)(n_layers?|num_layers|num_hidden_layers|encoder_layers|decoder_layers)$")  # count modules
COUNTED = re.compile(r"size|num_|n_|dim|head|layer|depth|rank|width|group|experts|length|position")
HEADS = re.compile(r"(^|_)heads?$|experts")
EXPERTS = re.compile(r"(num|n)_(local_|routed_)?experts$")
ROUTED = re.compile(r"(num|n)_experts_per_tok(en)?$")
COUNTS = re.compile(r"(_size|_dim|heads?|layers?|experts|n_embd)$")
NUMBER = re.compile(r"\d+")
HUGE = 1 << 31


@contextmanager
def told(folder: Path, config: Mapping[str, Any], kept: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Errors of transformers inside the block name the field that is wrong; ``kept`` ones are told by the caller.

    Raises:
        ModelError: in their place.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (QuarkError, *kept)):
            raise
        wrong = [f"{name} is {value!r}" for name, value in numbers(config) if is_wrong(name, value)]
        what = f" ({', '.join(wrong[:3])})" if wrong else ""
        reason = " ".join(str(error).split()) or type(error).__name__
        file = str(folder / "config.json")
        raise ModelError(f"{file!r} describes no model that transformers can make{what}: {reason:.200}") from error


def numbers(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of every number, with the names of what it is in."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{before}{name}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield before + name, value


def is_wrong(name: str, value: int) -> bool:
    """Whether a number can be no size."""
    return bool(COUNTED.search(name)) and not name.endswith("_id") and not 0 < value < HUGE


def check_counts(folder: Path, config: Mapping[str, Any], tensors: Iterable[str]) -> None:
    """There are not more layers than tensors, so that making them has an end, and no numbers that cannot be.

    Raises:
        ModelError: there are.
    """
    count = len(list(tensors))
    experts = max((value for name, value in numbers(config) if EXPERTS.search(name)), default=0)
    for name, value in numbers(config):
        own = name.rpartition(".")[2]
        negative = HEADS.search(own) and value < 0
        routed = experts and ROUTED.search(own) and not 0 < value <= experts
        if negative or routed or (COUNTS.search(own) and value >= HUGE):
            raise ModelError(f"{str(folder / 'config.json')!r}: {name} is {value}, which no model has")
        if LAYERS.search(name.rpartition(".")[2]) and not 0 <= value <= count:
            raise ModelError(
                f"{str(folder / 'config.json')!r}: {name} is {value}, and the files hold {count} tensors in all"
            )


def check_layers(folder: Path, model: nn.Module, names: Iterable[str]) -> None:
    """Lists of layers are as long as the files say, layers have the parts that the model has in others, and a head
    that shares no weight is there.

    Args:
        folder: of the checkpoint.
        model: that its configuration makes.
        names: of its tensors, in the model.

    Raises:
        ModelError: a tensor of a layer that the model does not have, or the other way round; it is named.
    """
    file, stored = str(folder / "config.json"), set(names)
    lists = {path: len(module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    for name in sorted(stored):
        for found in NUMBER.finditer(name):
            length = lists.get(name[: found.start() - 1])
            beyond = length is not None and int(found[0]) >= length and name[found.start() - 1] == "."
            if beyond and not any(re.search(pattern, name) for pattern in ignored):
                raise ModelError(f"{str(folder)!r} holds the tensor {name!r}, for which {file!r} has no layer")
    patterns, head = {NUMBER.sub("#", name) for name in stored}, untied_head(model, stored)
    for name, _ in model.named_parameters():
        path, _, own = name.rpartition(".")
        of_others = NUMBER.search(name) and NUMBER.sub("#", name) in patterns
        part = own == "bias" and f"{path}.weight" in stored
        if name not in stored and (of_others or part or name == head):
            raise ModelError(f"{str(folder)!r} lacks the tensor {name!r}, which {file!r} asks for")


def untied_head(model: nn.Module, stored: set[str]) -> str | None:
    """The name of the weight of a head that has its own, where the embedding is stored; None: there is none."""
    if getattr(getattr(model, "config", None), "tie_word_embeddings", True) is not False:
        return None
    asked: Any = model
    head, embedding = asked.get_output_embeddings(), word_embeddings(model)
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    return names.get(id(head)) if names.get(id(embedding)) in stored else None
