"""Whether ``config.json`` fits the tensors of its folder: what shapes alone do not show, and errors of transformers as
sentences that name the field."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.errors import ModelError, QuarkError
from quark.torch.experts import unfuse_experts
from quark.torch.export.left_out import LAYER, depth_of, is_ignored
from quark.torch.export.original import names_of, way_in
from quark.torch.export.transformers_reads import OTHERS, without_values
from quark.torch.files.config_fields import is_wrong, numbers
from quark.torch.files.plain import lacks, placeless
from quark.torch.short_sample import example

log = logging.getLogger(__name__)

PADDING, PADDED = "Padding_idx must be within", re.compile(r"pad_token_id$|vocab_size$")
PAD_IS = "pad_token_id, which its class sets where the file has none, must be below vocab_size; null is allowed"
MISFIT = re.compile(r"broadcast a dimension|size of tensor|expanded size|invalid for input|cannot be multiplied|to sum")
NUMBER = re.compile(r"\d+")


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
        padding = PADDING in str(error)
        wrong = [
            f"{name} is {value!r}"
            for name, value in numbers(config)
            if is_wrong(name, value) or (padding and PADDED.search(name))
        ]
        what = f" ({', '.join(wrong[:3])})" if wrong else ""
        reason = PAD_IS if padding else " ".join(str(error).split()) or type(error).__name__
        file = str(folder / "config.json")
        raise ModelError(f"{file!r} describes no model that transformers can make{what}: {reason:.200}") from error


def check_derived(folder: Path, config: Mapping[str, Any], model: nn.Module) -> None:
    """A size of heads that no tensor shows is one with which the layers fit each other, as far as they run.

    Args:
        folder: of the checkpoint.
        config: its ``config.json``.
        model: that it makes; it is run without values, where a size is another one than its class makes.

    Raises:
        ModelError: a size with which they do not, and without which they do.
    """
    for name, value, usual, other in derived_sizes(config, getattr(model, "config", None)):
        if (why := misfit(model)) and not misfit(like(model, other)):
            raise ModelError(
                f"{str(folder / 'config.json')!r}: {name} is {value}, with which the layers do not fit each other "
                f"({why:.120}); without it the class makes {usual} of the other sizes"
            )


def derived_sizes(config: Mapping[str, Any], own: Any) -> Iterator[tuple[str, int, int, Any]]:
    """(name, value, the size that the class makes where the file has none, the configuration then) of sizes of heads
    that differ from it."""
    for name, value in numbers(config):
        part, _, last = name.rpartition(".")
        if last.endswith("head_dim") and "." not in part and hasattr(own, "from_dict"):
            less: Any = copy.deepcopy(dict(config))
            del (less[part] if part else less)[last]
            with suppress(Exception):
                other = type(own).from_dict(less)
                usual = getattr(getattr(other, part) if part else other, last, None)
                if isinstance(usual, int) and usual != value:
                    yield name, value, usual, other


def like(model: nn.Module, config: Any) -> nn.Module:
    """A model of the same class, without values; the model itself where a configuration makes none."""
    with suppress(Exception), torch.device("meta"):
        return type(model)(config)
    return model


def misfit(model: nn.Module) -> str | None:
    """Why sizes do not fit each other while a language model runs without values, as far as it does; None: they do."""
    bare = without_values(model)
    for mask in (False, True):
        try:
            given = example(bare)
            bare(**given, **({"attention_mask": torch.ones_like(given["input_ids"])} if mask else {}))
        except (*OTHERS, AttributeError, AssertionError, QuarkError) as error:  # what runs on values may not here
            if MISFIT.search(str(error)):
                return " ".join(str(error).split())
    return None


def check_lacking(
    folder: Path,
    model: nn.Module,
    stored: Mapping[str, str],
    stacks: Mapping[str, tuple[tuple[int, ...], Iterable[str]]],
) -> None:
    """Every parameter is there, or made of what is.

    Args:
        folder: of the checkpoint.
        model: that its configuration makes, stacked experts taken apart.
        stored: names in the files by names in the model.
        stacks: shapes of the stacked tensors, and their parts.

    Raises:
        ModelError: a tensor that is missing; it is named.
    """
    lacking = [name for name, _ in model.named_parameters() if name not in stored]
    if not lacking:
        return
    places = {name: (tuple(value.shape), value.dtype) for name, value in model.state_dict().items()}
    way = way_in(model, {**places, **{name: (shape, torch.float32) for name, (shape, _) in stacks.items()}})
    known = {*stored, *stored.values()}
    made = {name for inside, outside in way.groups.values() if known.issuperset(outside) for name in inside}
    made |= {part for name, (_, parts) in stacks.items() if name in made for part in parts}
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    made |= {name for name, source in ties.items() if source in stored}
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    for name in lacking:
        if name not in made and not any(re.search(pattern, name) for pattern in patterns):
            raise lacks(folder, name)


def check_unplaced(folder: Path, model: nn.Module, names: Iterable[str]) -> None:
    """Tensors that the model has no place for are of none of its lists of layers: the list is as long as the files
    say, and its layers have all parts that are stored.

    Args:
        folder: of the checkpoint.
        model: that its configuration makes.
        names: of the tensors; those that transformers leaves unread may be of a head behind the layers.

    Raises:
        ModelError: one of a layer; it is named.
    """
    ignored = {name for name in names if is_ignored(model, name)}
    names, known = set(names) - ignored | layers_behind(model, ignored), patterns_of(model)
    known |= {
        NUMBER.sub("#", f"{name}.0") for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
    }
    for name in sorted(names):
        within = {NUMBER.sub("#", name)} | {NUMBER.sub("#", name[: one.end()]) for one in NUMBER.finditer(name)}
        if within & known:
            raise placeless(folder, name)


def patterns_of(model: nn.Module) -> set[str]:
    """The names of a model's tensors, in memory and outside, without the numbers in them."""
    outside = names_of(model)
    return {NUMBER.sub("#", text) for name in model.state_dict() for text in (name, outside.outside(name))}


def layers_behind(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Of the tensors that are left unread those of layers like the model's: a head has parts that no layer has."""
    behind: dict[str, list[str]] = {}
    for name in names:
        for one in LAYER.finditer(name):
            behind.setdefault(name[: one.end()], []).append(name)
    known: set[str] = set()
    if behind:
        like = deeper(model)
        known |= patterns_of(like)
        unfuse_experts(like)
        known |= patterns_of(like)
    whole = (own for own in behind.values() if known.issuperset(NUMBER.sub("#", name) for name in own))
    return {name for own in whole for name in own}


def deeper(model: nn.Module) -> nn.Module:
    """A copy of a model, without values, with layers in the place of its heads, where its class makes that."""
    depth, heads = depth_of(model)
    if not heads:
        return without_values(model)
    config: Any = copy.deepcopy(model.config)
    config.get_text_config().num_hidden_layers = depth + heads
    with suppress(Exception), torch.device("meta"):
        return type(model)(config)
    return without_values(model)


def left_behind(folder: Path, model: nn.Module, stored: Mapping[str, str]) -> list[str]:
    """The tensors that the model has no place for, told: transformers leaves them behind when it loads the folder.

    Args:
        folder: of the checkpoint.
        model: that its configuration makes; one that is no model of transformers may lack parts.
        stored: names in the files by names in the model.

    Raises:
        ModelError: one of a layer; it is named.
    """
    own = model.state_dict()
    apart = {name: one for name, one in stored.items() if name not in own}
    if not apart or not hasattr(model, "config"):
        return []
    way = way_in(model, {name: (tuple(value.shape), value.dtype) for name, value in own.items()})
    apart = {name: one for name, one in apart.items() if not {name, one} & {*way.single, *way.member}}
    check_unplaced(folder, model, apart.values())
    left = [name for name, one in apart.items() if not is_ignored(model, one)]
    if left:
        what = f"{type(model).__name__} has no place for {len(left)} tensors of {str(folder)!r}, such as {left[0]!r}"
        log.warning("%s: they are left behind, as transformers leaves them", what)
    return left


def check_types(folder: Path, model: nn.Module, stored: Mapping[str, torch.dtype]) -> None:
    """What the model has as floats is stored as floats: integers would be codes, and nothing says what of.

    Args:
        folder: of the checkpoint, which says nothing of a quantization.
        model: that its configuration makes.
        stored: the types of the tensors in its files.

    Raises:
        ModelError: a parameter that is stored as integers; it is named.
    """
    integers = {name for name, dtype in stored.items() if not dtype.is_floating_point and dtype != torch.bool}
    if not integers:
        return
    parameters = model.named_parameters(remove_duplicate=False)
    floats = {name: (tuple(value.shape), value.dtype) for name, value in parameters if value.is_floating_point()}
    if codes := sorted(integers & {*floats, *names_of(model).written(floats)}):
        file, kind = str(folder / "config.json"), str(stored[codes[0]]).removeprefix("torch.")
        raise ModelError(
            f"{str(folder)!r}: the tensor {codes[0]!r} is {kind}, and {file!r} has no quantization_config that says "
            f"what such numbers stand for; take the folder as it was published"
        )
