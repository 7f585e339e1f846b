"""Names of AMD Quark: every one of the stored list works, works with a deprecation, or says what to write instead."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import quark.migration
from quark.cli.app import app
from quark.config.options import OPTIONS
from quark.errors import QuarkError
from quark.migration.finder import Finder, MissingModuleError, MissingNameError, find, install

pytest.importorskip("torch")
pytest.importorskip("diffusers")
ROOT = Path(__file__).parents[1]
LIST = (ROOT / "docs" / "migrate" / "names.tsv").read_text(encoding="utf-8").splitlines()[1:]
ANSWERS = json.loads((Path(quark.migration.__file__).parent / "answers.json").read_text(encoding="utf-8"))
OF = re.compile(r"((?:`[^`]+`(?:, with | with |, or |, | or | and )?)+)(?: \([^)]*\))? of `(quark[\w.]*)`")
WRITE = re.compile(r"write 'from (\S+) import (\w+)'$")


def fetch(module: str, name: str) -> object:
    """What ``from module import name`` gives; the module for an empty name."""
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def fault(module: str, name: str) -> str | None:
    """What is wrong with the answer about a name; None: it is one of the three."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            value = fetch(module, name)
        except (MissingNameError, MissingModuleError) as error:
            sentence = str(error).partition(" of AMD Quark is not in this package: ")[2]
            return None if len(sentence) > 15 else f"says nothing: {error}"
        except (ImportError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
    for message in (str(one.message) for one in told if one.category is DeprecationWarning):
        where = WRITE.search(message)
        if where is not None and fetch(*where.groups()) is not value:
            return f"is something else than {where.group()}"
    return None


def test_every_name_of_the_list_has_one_of_three_answers() -> None:
    rows = [line.split("\t")[:2] for line in LIST]
    assert len(rows) > 3000
    faults = {f"{module}.{name}": found for module, name in rows if (found := fault(module, name))}
    assert faults == {}


def test_the_test_sees_a_name_without_an_answer() -> None:
    assert fault("quark.onnx", "NoSuchName") is not None
    assert fault("quark.no_such_module", "name") is not None


NOT_HERE = {  # of scripts for AMD Quark: what the message must name
    "quark.onnx.get_library_path": "register_custom_ops_library",
    "quark.onnx.PowerOfTwoMethod": "XInt8Spec",
    "quark.onnx.calibration.methods.PowerOfTwoMethod": "XInt8Spec",
    "quark.onnx.quantize_static": "quantize_model",
    "quark.torch.save_params": "export_safetensors",
    "quark.torch.load_params": "import_model_from_safetensors",
    "quark.torch.export.ExporterConfig": "export_safetensors",
    "quark.torch.export.config.config.ExporterConfig": "export_safetensors",
    "quark.contrib.llm_eval.ppl_eval": "perplexity",
    "quark.torch.utils.llm.get_calib_dataloader": "quark torch quantize",
}


@pytest.mark.parametrize("name", NOT_HERE)
def test_what_is_not_here_says_what_to_write(name: str) -> None:
    module, _, last = name.rpartition(".")
    with pytest.raises(ImportError, match=re.escape(NOT_HERE[name])) as error:
        exec(f"from {module} import {last}", {})
    assert isinstance(error.value, QuarkError)


def test_what_is_elsewhere_works_and_says_so() -> None:
    import quark.onnx

    with pytest.warns(DeprecationWarning, match=r"write 'from quark.onnx import ExtendedQuantType'") as told:
        from quark.onnx import VitisQuantType
    assert VitisQuantType is quark.onnx.ExtendedQuantType
    assert told[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="logging"):
        from quark.common.utils.log import ScreenLogger
    assert ScreenLogger("mine").name == "mine"
    with pytest.warns(DeprecationWarning):
        from quark.onnx.quantization.quant_utils import VitisQuantType as again
    assert again is VitisQuantType


def test_the_class_that_transformers_tests_import_is_that_of_loaded_layers() -> None:
    from quark.torch.quantized_layer import QuantLinear

    with pytest.warns(DeprecationWarning):
        from quark.torch.export.nn.modules.qparamslinear import QParamsLinear
    assert QParamsLinear is QuantLinear


def test_everything_else_is_as_python_has_it() -> None:
    import quark.onnx.tools.fix_shapes

    assert not hasattr(quark.onnx, "__wrapped__")
    assert not hasattr(quark.onnx.tools.fix_shapes, "_private")
    with pytest.raises(AttributeError, match="no attribute 'Int8Spce'"):
        quark.onnx.Int8Spce  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Int8Spce'"):
        exec("from quark.onnx import Int8Spce", {})
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module("quark.nothing")
    assert not isinstance(error.value, QuarkError)
    assert "fix_shapes" in inspect.getsource(quark.onnx.tools.fix_shapes)
    install()
    assert sum(isinstance(finder, Finder) for finder in sys.meta_path) == 1


def test_near_misses_of_names_that_are_here_are_shown() -> None:
    with pytest.raises(MissingNameError, match="Did you mean 'export_onnx'"):
        exec("from quark.torch.export.api import exprot_onnx", {})


def sentences() -> Iterator[str]:
    for row in ANSWERS["modules"].values():
        yield row if isinstance(row, str) else row["instead"]
    for rows in ANSWERS["names"].values():
        yield from (text for text in rows.values() if not text.startswith("= "))


def unknown_names(sentence: str) -> list[str]:
    """What a sentence recommends and does not exist: ``a``, ``b(…)`` of ``module``, and dotted names."""
    found = []
    for names, module in OF.findall(sentence):
        first = [re.match(r"[A-Za-z_]\w*", name) for name in re.findall(r"`(?!quark\.)([^`]+)`", names)]
        found += [f"{module}.{one.group()}" for one in first if one]
    found += re.findall(r"`(quark\.[\w.]+)`", sentence)
    return [name for name in found if not exists(name)]


def exists(name: str) -> bool:
    module, _, last = name.rpartition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return hasattr(importlib.import_module(module), last) or importlib.import_module(name) is not None
        except ImportError:
            return False


def test_what_the_sentences_recommend_exists() -> None:
    assert {text: lacking for text in sentences() if (lacking := unknown_names(text))} == {}
    assert unknown_names("write `no_such_function(x)` of `quark.torch`") == ["quark.torch.no_such_function"]


def test_options_that_the_sentences_recommend_exist() -> None:
    texts = [text for text in sentences() if "extra_options" in text]
    named = {name for text in texts for name in re.findall(r"`([A-Z]\w+)(?:=\w+)?`", text)} - {"XINT8", "MATMUL_NBITS"}
    assert len(named) > 5
    assert named <= set(OPTIONS)


def test_commands_that_the_sentences_recommend_exist() -> None:
    tree = typer.main.get_command(app)
    for words in {tuple(text.split()) for one in sentences() for text in re.findall(r"`quark ([a-z][^`]*)`", one)}:
        command = tree
        for word in words[:2]:
            command = command.commands[word]  # type: ignore[attr-defined]


def test_modules_that_are_here_are_imported_whatever_the_table_says() -> None:
    """``from quark.torch.utils import diffusers`` was refused until somebody had imported the module by its name."""
    import pkgutil

    import quark

    found = []
    for package in pkgutil.walk_packages(quark.__path__, "quark."):
        if not package.ispkg:
            continue
        module = importlib.import_module(package.name)
        for inner in pkgutil.iter_modules(module.__path__):
            with pytest.raises(AttributeError):
                find(package.name, inner.name, module)
            found.append(f"{package.name}.{inner.name}")
    assert "quark.torch.utils.diffusers" in found
