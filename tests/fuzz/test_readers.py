"""Whatever opens a file that a user gives is fuzzed: the functions are read off the source, the calls off the runs.

A function of the package that calls one of ``OPENERS`` is a reader. Every reader must be met by a kind of file of
``tests.fuzz.readers`` in an undamaged (or any) case, or stand in ``APART`` with the reason: a new one turns this red.
"""

from __future__ import annotations

import ast
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType

import pytest
from tests.fuzz.readers import READERS, causes

import quark
from quark.errors import QuarkError

ROOT = Path(quark.__file__).parent
#: Calls that open a file, or have a library open it.
OPENERS = {
    *("open", "read_text", "read_bytes", "memmap", "fromfile", "ZipFile", "safe_open", "load_file", "from_pretrained"),
    *("read_json", "read_settings", "read_state", "load_array", "ArrayArchive", "SpecialVocab", "SentencePieceVocab"),
    *("get_data", "exec_module", "run_path", "read_arrays"),
}
#: What opens no file of a user's, or runs code of the user's by design: (reason, functions).
APART = {
    "a part of the package, or of the system": (
        "cli.doctor", "report.html", "report.process", "migration.answers", "config.file_formats", "onnx.qdq.slower",
        "onnx.tuned_speed.processor", "search.knapsack._silent", "cli.torch_refusals.torch_version",
        "torch.transformers_names",
    ),
    "written by this process a moment ago": (
        "onnx.injected", "onnx.layer_runs", "torch.layer_runs", "torch.one_pass", "onnx.kernel_times", "onnx.scratch",
        "torch.export.shards",
        "onnx.algorithms.samples",
        "files.lock", "files.atomic", "files.arrays", "onnx.climb",
    ),
    "its first bytes, whatever they are": ("onnx.graph.other_formats",),
    "a digest of bytes, whatever they are": ("files.identity", "search.function.digest_of"),
    "read to tell our results from others, bytes only": ("files.ours",),
    "code of the user's, which is run": ("search.function.run_file", "cli.transformation.register"),
    "a package of Python's that is imported": ("migration.finder.exec_module",),
    "data of the demonstration": ("demo.data",),
    "fuzzed elsewhere than in an undamaged case": (
        "files.journal",
        "torch.export.gguf_vocabulary.sentencepiece_tokens",
        "onnx.graph.wire.array",  # of weights, large ones only: tests.onnx_flow.test_wire, where all are large
    ),
    "quoted, whatever its bytes are": ("torch.export.card",),
    "reads on from files of `index` and `safetensors`, which are fuzzed": (
        "torch.language.float_model", "torch.export.reload", "torch.files",
        "torch.export.model_files",
    ),
}  # fmt: skip


@cache
def readers() -> tuple[tuple[str, str], ...]:
    """What ``_readers`` finds: all files are parsed once."""
    return tuple(_readers())


def _readers() -> Iterator[tuple[str, str]]:
    """(file, function) of everything that calls an opener; the outermost function of a module or class."""
    for path in sorted(ROOT.rglob("*.py")):
        for function in _functions(ast.parse(path.read_text(encoding="utf-8"))):
            calls = (one for one in ast.walk(function) if isinstance(one, ast.Call))
            if any(_name(call) in OPENERS for call in calls):
                yield str(path.relative_to(ROOT)), function.name


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    for one in ast.iter_child_nodes(tree):
        if isinstance(one, ast.FunctionDef):
            yield one
        else:
            yield from _functions(one)


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def met() -> set[tuple[str, str]]:
    """(file, function) of the package that run while the readers of the table read some files of each kind."""
    found: set[CodeType] = set()

    def called(frame: object, event: str, argument: object) -> None:
        if event == "call":
            found.add(frame.f_code)  # type: ignore[attr-defined]

    for kind, reader in READERS.items():
        whole = [one for one in causes(kind) if "as it should" in one.damage or "as they should" in one.damage]
        for one in (*whole, *causes(kind)[:: len(causes(kind)) // 8]):
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), suppress(QuarkError):
                warnings.simplefilter("ignore")
                one.make(Path(folder))
                sys.setprofile(called)
                try:
                    reader.read(Path(folder))
                finally:
                    sys.setprofile(None)
    inside = (one for one in found if one.co_filename.startswith(str(ROOT)))
    return {(str(Path(one.co_filename).relative_to(ROOT)), one.co_name) for one in inside}


def apart(file: str, function: str) -> bool:
    name = f"{file.removesuffix('.py').replace('/', '.')}.{function}"
    return any(f"{name}.".startswith(f"{one}.") for names in APART.values() for one in names)


@pytest.mark.skipif(not hasattr(sys, "setprofile"), reason="needs profiling")
def test_whatever_opens_a_file_of_a_user_is_fuzzed() -> None:
    for library in {name for reader in READERS.values() for name in reader.needs}:
        pytest.importorskip(library)
    wanted = {one for one in readers() if not apart(*one)}
    assert len(wanted) > 20
    assert wanted - met() == set()


def test_what_is_apart_is_there() -> None:
    names = [f"{file.removesuffix('.py').replace('/', '.')}.{function}." for file, function in readers()]
    stale = [one for rows in APART.values() for one in rows if not any(name.startswith(f"{one}.") for name in names)]
    assert stale == []
