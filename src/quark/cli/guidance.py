"""What stands under an error: the page that helps and, with ``--verbose``, what a report of a defect needs.

The page is chosen by the place in the package that refused, or by the kind of error: one row each. Pages are named by
their path in the documentation.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quark.cli.sections import options_of
from quark.errors import ConfigError, DataError, ModelError, ModelNotFoundError, OutputError, QuarkError

#: Module that refused, or a module above it -> page; the first row that fits counts.
BY_PLACE: tuple[tuple[str, str], ...] = (
    ("quark.cli.auto", "docs/auto.md"),
    ("quark.cli.onnx_auto", "docs/auto.md"),
    ("quark.cli.torch_auto", "docs/auto.md"),
    ("quark.onnx.trials", "docs/auto.md"),
    ("quark.onnx.label", "docs/auto.md#metrics-with-labels"),
    ("quark.torch.auto", "docs/auto.md"),
    ("quark.cli.settings", "docs/options.md"),
    ("quark.cli.memory", "docs/faq.md#there-is-not-enough-memory"),
    ("quark.files.vocabulary", "docs/export.md"),
    ("quark.files", "docs/reliability.md"),
    ("quark.onnx.data", "docs/cli.md#samples"),
    ("quark.onnx.image_files", "docs/cli.md#samples"),
    ("quark.onnx.audio_files", "docs/cli.md#samples"),
    ("quark.onnx.preprocessing", "docs/cli.md#samples"),
    ("quark.onnx.passes", "docs/passes.md"),
    ("quark.onnx.tools", "docs/tools.md"),
    ("quark.onnx.algorithms", "docs/choose.md#algorithms"),
    ("quark.onnx.auto", "docs/auto.md"),
    ("quark.onnx.calibration", "docs/calibration.md"),
    ("quark.onnx.graph", "docs/faq.md#the-model-is-refused"),
    ("quark.observers", "docs/calibration.md"),
    ("quark.config.presets", "docs/choose.md#presets"),
    ("quark.config.options", "docs/options.md"),
    ("quark.config.file_formats", "docs/export.md"),
    ("quark.search.auto", "docs/auto.md"),
    ("quark.search", "docs/search.md"),
    ("quark.torch.export", "docs/export.md"),
    ("quark.torch.files", "docs/torch/files.md"),
    ("quark.torch.algorithms", "docs/choose.md#algorithms"),
    ("quark.torch.graph", "docs/torch/graph_mode.md"),
    ("quark.torch.kv_cache", "docs/torch/kv_cache.md"),
    ("quark.torch.template", "docs/torch/templates.md"),
    ("quark.torch.config", "docs/torch/configuration.md"),
    ("quark.torch", "docs/torch/strategies.md"),
    ("quark.cli.torch", "docs/torch/cli.md"),
    ("quark.cli.", "docs/cli.md"),
)
#: Option that the sentence begins with -> page, wherever it was raised.
BY_FLAG: dict[str, str] = {
    "--algorithm": "docs/choose.md#algorithms",
    "--extension": "docs/cli.md#names-of-your-own",
    "--preprocess": "docs/cli.md#samples",
    "--preset": "docs/choose.md#presets",
    "--set": "docs/options.md",
}
#: Kind of error -> page, wherever it was raised.
FIRST: dict[type[QuarkError], str] = {
    OutputError: "docs/faq.md#nothing-is-overwritten",
    ModelNotFoundError: "docs/quickstart.md",
}
#: Kind of error -> page, where no row above fits; the nearest class of the error counts.
BY_KIND: dict[type[QuarkError], str] = {
    DataError: "docs/cli.md#samples",
    ConfigError: "docs/seeds/configuration.md",
    ModelError: "docs/faq.md#the-model-is-refused",
    QuarkError: "docs/faq.md",
}
#: What a message says to a program -> what it says on the command line. ``named`` does the same wherever a message
#: quotes what was typed.
FLAGS: tuple[tuple[str, str], ...] = (
    (
        r"^nodes_to_exclude: the (?:node name|pattern) '(.+?)' matches no node of the model\.(.*)$",
        r"--exclude \1: no such node.\2 `quark onnx tool print_names` lists the names",
    ),
    (r"^nodes_to_exclude: ", "--exclude: "),
    (
        r"^use_cache: (.*); export it without use_cache$",
        r"--format onnx: \1, and no other graph with a cache is written; use --format quark or compressed-tensors, or "
        r"`quark.torch.export_onnx` in Python, which writes a graph without a cache",
    ),
    (
        r"dataloader is None: give one, or use is_dynamic=True",
        "there are none: add `--data text.txt`, or choose a scheme with dynamic activations, such as ptpc_fp8",
    ),
    (
        r"^global_quant_config: weight of '((?:.+\.)?(.+?))': group_size=(\d+) does not divide the (\d+) .*$",
        r"--scheme: groups of \3 do not divide the \4 inputs of '\1'; take a scheme of whole rows, "
        r"such as int4_wo_per_channel, or give such layers another: --layer '*\2=int8_wo_per_channel'",
    ),
    (r" \(field extra_options\)", ""),
    (r"\bextra_options\b", "--set"),
    (r"\bcustom_mode (?=')", "--format "),  # before a scheme of the same name is looked for
    (r"^the option (\w+) ", r"--set \1 "),
    (r"^give a target such as (.+) or a limit of the budget", r"give --target \1 or --limit"),
)
#: What a message says to a program -> what commands call it: the first of which a command has the flag.
SPELLINGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"\b(?:the option )?UserCustomOpLibPath\b", ("--custom-ops", "--set UserCustomOpLibPath")),
)
DETAILS = "add --verbose for details"


def place(error: BaseException) -> tuple[str, str, int]:
    """Module, function and line of this package that raised, or had a name checked; empty where none did."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [(frame.f_globals.get("__name__", ""), frame) for frame in frames]
    ours = [frame for name, frame in names if name.split(".")[0] == "quark" and name != "quark.errors"]
    if not ours:
        return "", "", 0
    return ours[-1].f_globals["__name__"], ours[-1].f_code.co_name, ours[-1].f_lineno


def page_of(error: QuarkError, said: str = "") -> str:
    """The page that says more about an error, which the command line tells as ``said``."""
    if type(error) in FIRST:
        return FIRST[type(error)]
    flag = re.match(r"(?:unknown )?(--[\w-]+)", said)
    if flag and flag[1] in BY_FLAG:
        return BY_FLAG[flag[1]]
    module = place(error)[0]
    for above, page in BY_PLACE:
        if module.startswith(above):
            return page
    return next(BY_KIND[kind] for kind in type(error).__mro__ if kind in BY_KIND)


def sentence(error: QuarkError, given: Iterable[tuple[str, str]] = (), flags: Container[str] = ()) -> str:
    """The message of an error with flags in the place of fields.

    Args:
        error: what was raised.
        given: the options that were typed, and their values.
        flags: those that the command has.
    """
    said = str(error)
    for pattern, flag in FLAGS:
        said = re.sub(pattern, flag, said)
    for pattern, spellings in SPELLINGS:
        said = re.sub(pattern, next((one for one in spellings if one.split()[0] in flags), r"\g<0>"), said)
    return named(said, given)


def named(said: str, given: Iterable[tuple[str, str]]) -> str:
    """A message with the option whose value it quotes, where it names no option before.

    ``unknown preset 'A8W9'`` after ``--preset A8W9`` becomes ``unknown --preset 'A8W9'``, and ``'int9' is no scheme``
    after ``--layer *=int9`` becomes ``--layer '*=int9': 'int9' is no scheme``. Words that deny something stay: who does
    not read a scheme, say.
    """
    for flag, value in given:
        wholes = (value, str(Path(value)), str(Path(value).absolute()))
        for part in filter(None, (*wholes, *re.split(r"[=+:]", value))):
            before, quoted, after = said.partition(repr(part))
            if said.startswith(f"{part}: "):
                return f"{flag} {said}"
            if not quoted or "--" in before:
                continue
            noun = re.fullmatch(r"(unknown |)(?:(?!.*\b(?:no|not|cannot)\b)[\w ]+:? )?", before)
            if part in wholes and noun:
                return f"{noun[1]}{flag} {quoted}{after}"
            return f"{flag} {value!r}: {re.sub(r'^[a-z_]+: ', '', said)}"
    return said


def typed(program: Any, arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options that were typed with a value, by their first spelling, and the value.

    Args:
        program: the command line.
        arguments: the words behind its name.
    """
    names = {word: one.opts[0] for one in _options(program, arguments) if not one.is_flag for word in one.opts}
    for word, following in zip(arguments, (*arguments[1:], ""), strict=True):
        flag, equals, value = word.partition("=")
        if flag in names:
            yield names[flag], value if equals else following


def flags_of(program: Any, arguments: Sequence[str]) -> frozenset[str]:
    """The options of the command that was typed."""
    return frozenset(one.opts[0] for one in _options(program, arguments))


def _options(program: Any, arguments: Sequence[str]) -> Iterable[Any]:
    for word in arguments:
        program = getattr(program, "commands", {}).get(word, program)
    return list(options_of(program))


def words(error: QuarkError, verbose: bool, said: str = "") -> Sequence[str]:
    """The lines under the sentence ``said`` of an error."""
    page = page_of(error, said)
    if not verbose:
        return [f"see {page}; {DETAILS}"]
    module, function, line = place(error)
    lines = [f"see {page}", f"kind: {type(error).__name__}", f"raised by: {module}.{function}, line {line}"]
    lines += [f"caused by: {type(one).__name__}: {' '.join(str(one).split())}" for one in _causes(error)]
    return [*lines, "`quark doctor` prints the versions that a report of a defect needs"]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """What led to ``error``, the nearest first; each once: an error that is raised again can be its own context."""
    seen = {id(error)}
    cause = error.__cause__ or error.__context__
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
