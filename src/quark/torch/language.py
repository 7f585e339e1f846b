"""Language models in folders: loading them without running their code, texts as token windows, perplexity.

    perplexity = exp( mean over all tokens but the first of  -log p(token | tokens before it in its window) )

Windows do not overlap but for one token, so that every token is predicted once; the last window may be shorter.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.errors import DataError, ModelError, QuarkError
from quark.reading import read_json, read_object, reason_of
from quark.report.progress import bars
from quark.search.function import load_function
from quark.torch.calibration import NOT_RUN, RAISED_BY
from quark.torch.devices import usable
from quark.torch.export.model_files import name_inside
from quark.torch.files.plain import lacks, misshapen
from quark.torch.template_reading import vocabularies
from quark.torch.token_files import empty, no_word, read_rows

log = logging.getLogger(__name__)
Ids = torch.Tensor
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"),
)
DAMAGED_TOKENIZER = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError, RecursionError),
)
"""What transformers raises where a field has another type or is missing; tokenizers raises ``Exception`` itself."""


def load_model(
    folder: Path, device: str = "cpu", trust_remote_code: bool = False, dtype: torch.dtype | None = None
) -> nn.Module:
    """The model in a folder, in ``eval()``: a float one in its own type or in ``dtype``, or a quantized one.

    It is what ``config.json`` names, where transformers has that in a registry, or a language model. A model that is
    cast afterwards is another one: its rotary frequencies, and what transformers keeps in float32, would be cast too.

    Raises:
        ModelError: no model, pickled weights, or a model that transformers cannot load.
        ConfigError: a device that is not there.
    """
    if not folder.is_dir():
        raise ModelError(f"{str(folder)!r} is not a folder; models are loaded from local folders")
    usable(device)
    from quark.torch.export.checkpoint import method_of

    if (method := method_of(folder)) is not None:
        from quark.torch.export.reload import own_model
        from quark.torch.files.foreign import OWN, model_to_run

        if method not in OWN:
            return model_to_run(folder).to(device)
        return own_model(None, folder, trust_remote_code=trust_remote_code, device=device)
    return float_model(folder, trust_remote_code, dtype).to(device).eval()


def float_model(folder: Path, trust_remote_code: bool, dtype: torch.dtype | None) -> nn.Module:
    """The float model in a folder; arguments and errors as in ``load_model``."""
    from quark.torch.export.checkpoint import check_no_adapter, check_pickled, read_checkpoint
    from quark.torch.files.config_fields import check_counts
    from quark.torch.files.fitting import check_derived, check_types, told
    from quark.torch.files.named import check_code, check_named
    from quark.torch.files.skeleton import stored_tensors

    check_no_adapter(folder)
    check_pickled(folder)
    config = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    check_code(folder, config, trust_remote_code)
    stored = stored_tensors(read_checkpoint(folder))
    check_named(folder, config)
    check_counts(folder, config, stored)
    try:
        with told(folder, config, (OSError, ValueError)):
            loaded: Any = _kind(config).from_pretrained(
                folder,
                dtype="auto" if dtype is None else dtype,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are told below, by name
                output_loading_info=True,
            )
    except (OSError, ValueError) as error:
        raise ModelError(f"{str(folder)!r} cannot be loaded: {first_line(error)}") from error
    model: nn.Module = loaded[0]
    check_fit(folder, model, loaded[1])
    check_types(folder, model, {name: one.dtype for name, one in stored.items()})
    check_derived(folder, config, model)
    return model


def _kind(config: Mapping[str, Any]) -> Any:
    """The class of transformers that loads a model: what ``architectures`` names, where a registry of its has that."""
    import transformers
    from transformers.models.auto import modeling_auto

    listed = config.get("architectures")
    named = name_inside(str(listed[0])) if isinstance(listed, list) and listed else ""
    tables = (table for name, table in vars(modeling_auto).items() if re.fullmatch("MODEL_.*MAPPING_NAMES", name))
    known = any(named in ([one] if isinstance(one, str) else one) for table in tables for one in table.values())
    return getattr(transformers, named) if known else transformers.AutoModelForCausalLM


def check_fit(folder: Path, model: nn.Module, told: Mapping[str, Any]) -> None:
    """The tensors of a folder are those that its ``config.json`` asks for.

    Raises:
        ModelError: one is missing, of another shape, or of a layer that the configuration does not have; it is named.
    """
    order = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    for name, stored, wanted in sorted(told["mismatched_keys"], key=lambda one: order.get(one[0], len(order))):
        raise misshapen(folder, name, stored, wanted)
    for name in sorted(told["missing_keys"]):
        raise lacks(folder, name)
    from quark.torch.files.fitting import check_unplaced

    check_unplaced(folder, model, told["unexpected_keys"])


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a folder.

    Raises:
        ModelError: there is none that transformers can load.
    """
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise ModelError(f"{str(folder)!r} is not a folder; models are loaded from local folders")
    for name in TOKENIZER_FILES:  # transformers and tokenizers read them without limits
        if (folder / name).exists() and not isinstance(read_json(folder / name, ModelError, "the file"), dict):
            raise ModelError(f"{str(folder / name)!r} holds no JSON object")
    check_config(folder, trust_remote_code)
    with _said(f"{str(folder)!r} has no tokenizer that can be loaded"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)


def check_config(folder: Path, trust_remote_code: bool) -> None:
    """``config.json``, which is read for a tokenizer too, holds values that its class takes.

    Raises:
        ModelError: it does not; the field is named.
    """
    from transformers import AutoConfig

    from quark.torch.files.fitting import told

    file = folder / "config.json"
    config = read_object(file) if file.is_file() else {}
    if not config.get("model_type"):
        return
    try:
        with told(folder, config, (OSError, ValueError)):
            AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:  # a type that transformers does not know has a tokenizer all the same
        if isinstance(error, ModelError):
            raise


@contextmanager
def _said(what: str) -> Iterator[None]:
    """What a damaged tokenizer raises, as one sentence; tokenizers also raises what is no ``Exception`` at all."""
    try:
        yield
    except BaseException as error:
        damaged = type(error) is Exception or isinstance(error, DAMAGED_TOKENIZER)
        if not damaged and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{what}: {reason_of(error)}") from error


def first_line(error: Exception) -> str:
    """The first line of an error's words."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def read_ids(path: Path, tokenizer: Callable[[], Any]) -> list[Ids]:
    """The token ids of a file, one row a document.

    Args:
        path: ``.txt`` (one document), ``.jsonl`` (one a line: a string, or an object with "text" or "input_ids"), or
            ``.npz`` or ``.npy`` of ids (rows are documents; of several arrays the one called input_ids). What an
            "attention_mask" beside ids has 0 for is padding, which no model sees, and left out.
        tokenizer: makes the tokenizer, where text has to be read.

    Raises:
        DataError: a file that is missing, empty, or of another kind.
    """
    found = read_rows(path)
    rows = [tokens_of(row, tokenizer) if isinstance(row, str) else torch.from_numpy(row) for row in found]
    rows = [row for row in rows if len(row)]
    if not rows:
        raise empty(path)
    return rows


def tokens_of(text: str, tokenizer: Callable[[], Any]) -> Ids:
    """The ids of a text; a warning about its length would be about one window, which it is not."""
    made = tokenizer()
    with _said("the tokenizer cannot read the data"):
        ids = made(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def windows(rows: list[Ids], length: int) -> Iterator[Ids]:
    """Windows of at most ``length + 1`` ids; each begins with the last token of the one before it in its document."""
    for row in rows:
        yield from (row[start : start + length + 1] for start in range(0, max(len(row) - 1, 1), length))


def first_windows(rows: list[Ids], length: int, most: int) -> list[Ids]:
    """The front of ``rows``, of which a perplexity measures at most ``most`` windows; rows without one are left out."""
    found: list[Ids] = []
    for row in rows:
        kept = row[: most * length + 1]
        if most and len(kept) > 1:
            found.append(kept)
            most -= math.ceil((len(kept) - 1) / length)
    return found


def calibration_samples(rows: list[Ids], length: int, count: int) -> list[dict[str, Ids]]:
    """The first ``count`` windows of ``length`` ids, as arguments of a model; short ones only if all are short."""
    parts = [row[start : start + length] for row in rows for start in range(0, len(row), length)]
    whole = [part for part in parts if len(part) == length]
    return [{"input_ids": part[None]} for part in (whole or parts)[:count]]


def batches(samples: list[dict[str, Ids]], size: int) -> list[dict[str, Ids]]:
    """Neighbouring samples of one length together, at most ``size`` of them."""
    found: list[list[Ids]] = []
    for sample in samples:
        ids = sample["input_ids"]
        if not found or len(found[-1]) == size or found[-1][0].shape != ids.shape:
            found.append([])
        found[-1].append(ids)
    return [{"input_ids": torch.cat(group)} for group in found]


def check_ids(model: nn.Module, parts: list[Ids]) -> None:
    """Token ids are words of the model, and windows no longer than its positions; a warning where it rotates them.

    Raises:
        DataError: one is not.
    """
    config: Any = getattr(model, "config", None)
    words = max(vocabularies(model), default=None)
    highest = max((int(part.max()) for part in parts if len(part)), default=0)
    if words is not None and highest >= words:
        raise no_word(highest, words)
    positions, longest = getattr(config, "max_position_embeddings", None), max(map(len, parts), default=0)
    if not isinstance(positions, int) or not 0 < positions < longest:  # XLNet says -1: any number
        return
    told = f"a window has {longest} tokens, and the model {positions} positions; use --seq-len {positions}"
    if getattr(config, "rope_parameters", None) is None:
        raise DataError(told)
    log.warning("%s: what it says beyond those that it was made for tells little about it", told)  # it runs


@torch.no_grad()
def perplexity(model: nn.Module, rows: list[Ids], length: int) -> float:
    """How surprised ``model`` is by texts, in windows of ``length`` tokens; lower is better, 1 is certainty.

    Raises:
        DataError: no token with another before it, tokens that the model cannot take, or one that predicts none.
    """
    device = next(model.parameters()).device
    parts = [part for part in windows(rows, length) if len(part) > 1]
    if not parts:
        raise DataError("a perplexity needs at least two tokens")
    check_ids(model, [part[:-1] for part in parts])
    total, count = 0.0, 0
    with bars() as update:
        for done, part in enumerate(parts, 1):
            ids = part.to(device)
            logits = getattr(answer_to(model, ids[None, :-1]), "logits", None)
            if logits is None or logits.dim() != 3:
                said = "predicts no tokens, so it has no perplexity: measure it with --metric FILE.py:FUNCTION"
                raise DataError(f"{type(model).__name__} {said}")
            logits = logits[0].double()
            total += float(nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
            count += len(ids) - 1
            update("perplexity", done, len(parts))
    return math.exp(total / count) if total / count < 700 else math.inf


def answer_to(model: nn.Module, ids: Ids) -> Any:
    """What a model makes of token ids.

    Raises:
        DataError: it needs something else beside them.
    """
    try:
        return model(input_ids=ids)
    except QuarkError:
        raise
    except NOT_RUN as error:
        raise not_run(type(model).__name__, error, "measure it with --metric FILE.py:FUNCTION") from error


@contextmanager
def samples_of_ids(name: str) -> Iterator[None]:
    """What the model called ``name`` raises at a sample of token ids, as one sentence.

    Raises:
        DataError: it needs something else beside them.
    """
    try:
        yield
    except QuarkError:
        raise
    except NOT_RUN as error:
        if not any(note.startswith(RAISED_BY) for note in getattr(error, "__notes__", ())):
            raise
        remedy = "choose a scheme with dynamic activations, such as ptpc_fp8, or give ModelQuantizer samples in Python"
        raise not_run(name, error, remedy) from error


def not_run(name: str, error: Exception, remedy: str) -> DataError:
    """That a model does not run on token ids, and why."""
    return DataError(f"{name} does not run on token ids alone ({reason_of(error)}): {remedy}")


def load_metric(text: str) -> Callable[[nn.Module, Any], Any]:
    """The function that ``file.py:function`` names; it is called with the model and the tokenizer's maker.

    Raises:
        ConfigError: no such file or function.
    """
    return load_function(text)
