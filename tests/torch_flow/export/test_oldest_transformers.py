"""What an older transformers would misread is refused, and its hooks are used as it calls them."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.consumers.tiny import answer, inputs_of, model_types, tiny_model

import quark.torch.export.main_export.quant_config_parser as parser
from quark.errors import ConfigError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.export import oldest_transformers
from quark.torch.export.loader import QuarkLoader
from quark.torch.export.write_as import export_as

transformers = pytest.importorskip("transformers")
CLASSES = dict(model_types())
ROOT = Path(__file__).parents[3]


def quantized(name: str, folder: Path) -> Any:
    """A quantized model, whose float original lies in ``folder``."""
    model = tiny_model(name, CLASSES[name])
    model.save_pretrained(folder)
    return ModelQuantizer(LLMTemplate.for_model(model).get_config("int4_wo_32")).quantize_model(model)


def test_it_is_the_bound_of_the_package() -> None:
    assert f'"transformers>={oldest_transformers.OLDEST}"' in (ROOT / "pyproject.toml").read_text("utf-8")


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers as it was."""
    monkeypatch.setattr(oldest_transformers, "installed", lambda: "5.12.1")


@pytest.mark.parametrize(
    ("installed", "refused"),
    [("4.57.6", True), ("5.9.0", True), ("5.12.1", True), ("5.13.0.dev0", False), ("5.100.0", False), ("6.0", False)],
)
def test_versions_are_numbers(installed: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oldest_transformers, "installed", lambda: installed)
    assert (oldest_transformers.why_too_old() is not None) is refused


@pytest.mark.usefixtures("older")
@pytest.mark.parametrize(
    ("name", "form", "program", "refused"),
    [
        ("llama", "quark", "transformers", "format quark: it needs 5.13 or newer, and 5.12.1 is installed"),
        ("llama", "quark", "vllm", None),
        ("llama", "compressed-tensors", "transformers", None),
        ("mixtral", "compressed-tensors", "transformers", "does not stack quantized weights .* 5.13 or newer"),
        ("mixtral", "compressed-tensors", "vllm", None),
    ],
)
def test_only_what_it_would_misread(name: str, form: str, program: str, refused: str | None, tmp_path: Path) -> None:
    model = quantized(name, tmp_path / "source")
    if refused is None:
        export_as(model, tmp_path / "made", form, tmp_path / "source", program=program)
        return
    with pytest.raises(ConfigError, match=refused):
        export_as(model, tmp_path / "made", form, tmp_path / "source", program=program)
    assert not (tmp_path / "made").exists()


@pytest.mark.usefixtures("older")
def test_it_is_told_by_transformers_itself() -> None:
    with pytest.raises(ConfigError, match=r"format quark: it needs 5.13 or newer"):
        importlib.reload(parser)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_hook_as_it_was_called_before_5_21(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized(name, tmp_path / "source")
    export_as(model, tmp_path / "made", "quark", tmp_path / "source", program="transformers")
    now, calls = QuarkLoader.update_weight_conversions, []

    def as_before(self: QuarkLoader, steps: list[Any], *given: Any) -> list[Any]:
        made = now(self, steps)
        calls.append((self, [one for one in made if "weight_scale" in str(one.source_patterns)]))
        return made

    monkeypatch.setattr(QuarkLoader, "update_weight_conversions", as_before)
    loaded = type(model).from_pretrained(tmp_path / "made", dtype=torch.float32)
    inputs = inputs_of(model)
    assert torch.equal(answer(loaded, inputs), answer(model, inputs))
    [(loader, [scale])] = calls
    assert not hasattr(loader, "loading")  # nor is the model kept
    assert scale.rename_source_key("a.weight_scale")[0] == "a.weight_quantizer.scale"
    [pattern] = scale._original_source_patterns  # up to 5.20 one without an end fits this name too, which stays:
    assert re.search(pattern, "a.weight_scale_2") is None


def test_readers_of_both_kinds_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """compressed-tensors' reader with a hook that is given no model, as up to 5.20."""
    from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer as Reader

    now, asked = Reader.update_weight_conversions, []

    def without(self: Any, weight_conversions: list[Any]) -> list[Any]:
        asked.append(len(weight_conversions))
        return list(now(self, weight_conversions, torch.nn.Module()))

    model = quantized("mixtral", tmp_path / "source")
    monkeypatch.setattr(Reader, "update_weight_conversions", without)
    assert "model" not in inspect.signature(Reader.update_weight_conversions).parameters
    export_as(model, tmp_path / "made", "compressed-tensors", tmp_path / "source", program="transformers")
    assert asked
