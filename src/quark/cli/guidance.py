"""What stands under an error: the page that helps and, with ``--verbose``, what a report of a defect needs.

The page is chosen by the place in the package that refused, or by the kind of error: one row each. Pages are named by
their path in the documentation.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence

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
    ("quark.search.trials", "docs/auto.md"),
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
)
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
#: What a message says to a program -> what it says on the command line, where a field is a flag.
FLAGS: tuple[tuple[str, str], ...] = (
    (
        r"^nodes_to_exclude: the (?:node name|pattern) '(.+?)' matches no node of the model\.(.*)$",
        r"--exclude \1: no such node.\2 `quark onnx tool print_names` lists the names",
    ),
    (r"^nodes_to_exclude: ", "--exclude: "),
    (
        r"dataloader is None: give one, or use is_dynamic=True",
        "there are none: add `--data text.txt`, or choose a scheme with dynamic activations, such as ptpc_fp8",
    ),
    (r"\bextra_options\b", "--set"),
    (r"^unknown target ", "unknown --layout "),
    (r"^unknown budget ", "unknown --budget "),
    (r"^give either a target such as (.+) or a limit of the budget$", r"give either --target \1 or --limit, not both"),
)
DETAILS = "add --verbose for details"


def place(error: BaseException) -> tuple[str, str, int]:
    """Module, function and line of this package that raised; empty names where none did."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = [frame for frame in frames if frame.f_globals.get("__name__", "").split(".")[0] == "quark"]
    if not ours:
        return "", "", 0
    return ours[-1].f_globals["__name__"], ours[-1].f_code.co_name, ours[-1].f_lineno


def page_of(error: QuarkError) -> str:
    """The page that says more about an error."""
    if type(error) in FIRST:
        return FIRST[type(error)]
    module = place(error)[0]
    for above, page in BY_PLACE:
        if module.startswith(above):
            return page
    return next(BY_KIND[kind] for kind in type(error).__mro__ if kind in BY_KIND)


def sentence(error: QuarkError) -> str:
    """The message of an error with flags in the place of fields."""
    said = str(error)
    for pattern, flag in FLAGS:
        said = re.sub(pattern, flag, said)
    return said


def words(error: QuarkError, verbose: bool) -> Sequence[str]:
    """The lines under the sentence of an error."""
    if not verbose:
        return [f"see {page_of(error)}; {DETAILS}"]
    module, function, line = place(error)
    lines = [f"see {page_of(error)}", f"kind: {type(error).__name__}", f"raised by: {module}.{function}, line {line}"]
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
