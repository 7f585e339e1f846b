"""What transformers would read wrongly: each question with a model that answers yes, and neighbours that do not."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.consumers import tiny
from tests.consumers.cell import effective
from torch import nn

from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.experts import UnfusedExperts
from quark.torch.export import transformers_reads as reads
from quark.torch.export.write_as import export_as
from quark.torch.quantization.config.config import FP8E4M3PerChannelSpec, QConfig, QLayerConfig

pytest.importorskip("transformers")


# ---- how many axes inputs have ---------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """A model of tokens that may ask for a mask, or for none."""

    def __init__(self, wants: bool | None) -> None:
        super().__init__()
        self.words, self.fc, self.wants = nn.Embedding(8, 4), nn.Linear(4, 4), wants
        self.masks: list[Any] = []
        self.on: list[bool] = []
        self.config = SimpleNamespace()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        self.masks.append(attention_mask)
        if self.wants is not None and (attention_mask is not None) is not self.wants:
            raise ValueError("a mask is missing, or too much")
        self.on += [part.enabled for part in reads.parts_of_inputs(self.fc)]
        return self.fc(self.words(input_ids))


def per_token(model: nn.Module) -> Any:
    specs = FP8E4M3PerChannelSpec(0), FP8E4M3PerChannelSpec(1, is_dynamic=True)
    weight, inputs = (spec.to_quantization_spec() for spec in specs)
    return ModelQuantizer(QConfig(QLayerConfig(weight=weight, input_tensors=inputs))).quantize_model(model)


@pytest.mark.parametrize("wants", [None, False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_model_shows_how_many_axes_its_inputs_have(wants: bool | None, device: str, enabled: bool) -> None:
    """Every place of a given mask counts; quantizers rest where there are no values, and are as they were behind it."""
    model = per_token(Tokens(wants)).to(device)
    (part,) = reads.parts_of_inputs(model.fc)
    part.enabled = enabled
    part.axes.clear()
    reads.show_axes(model, [model.fc])
    assert part.axes == {3} and part.enabled is enabled and not model.fc._forward_pre_hooks
    assert [mask is not None for mask in model.masks] == [False, True][: 1 + (wants is True)]
    assert model.on == [enabled and device == "cpu"]
    if wants and device == "cpu":
        assert model.masks[-1].tolist() == torch.ones(2, 16).tolist()


# ---- experts ---------------------------------------------------------------------------------------------------------


def scheme(weights: str = "int4") -> Any:
    return SimpleNamespace(weights=weights, input_activations=None)


STACKED = {
    "alike": (["experts.a", "experts.b", "other"], {}, None),
    "one expert is float": (["experts.a", "other"], {}, "'experts.b'"),
    "another layer has its own": (["experts.a", "experts.b", "other"], {"other": "int8"}, "'other'"),
    "an expert has its own": (["experts.a", "experts.b"], {"experts.b": "int8"}, "'experts.b'"),
    "others stay in one tensor": (["experts.a", "experts.b", "stack"], {"stack": None}, "'stack'"),
    "no expert is quantized": (["other"], {}, None),
}


@pytest.mark.parametrize("name", STACKED)
def test_stacked_experts_have_one_scheme_with_all_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named, own, told = STACKED[name]
    model = nn.Module()
    model.experts, model.other = (
        nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1), "act": nn.ReLU()}),
        nn.ReLU(),
    )
    if "stack" in own:
        model.stack = nn.Bilinear(1, 1, 1)
    monkeypatch.setattr(reads, "UnfusedExperts", nn.ModuleDict)
    monkeypatch.setattr(reads, "is_replaced", lambda module: False)
    monkeypatch.setattr(reads, "is_listed", lambda path, module, names: True)
    monkeypatch.setattr(reads, "is_fused", lambda module: isinstance(module, nn.Bilinear))
    schemes = {layer: scheme(own.get(layer, "int4")) for layer in named if layer != "stack"}
    found = reads.experts(model, schemes, None)  # type: ignore[arg-type]
    assert found is None if told is None else f"and {told} has another one than 'experts.a', or none" in str(found)


def unfused(name: str) -> Any:
    module = UnfusedExperts.__new__(type("Own", (UnfusedExperts,), {"fused_class": type(name, (), {})}))
    nn.Module.__init__(module)
    return module


@pytest.mark.parametrize(("name", "replaced"), [("Llama4TextExperts", True), ("MixtralExperts", False)])
def test_which_experts_it_has_in_a_list(name: str, replaced: bool) -> None:
    """Those of Llama 4 (transformers.quantizers.base); the scales of others it looks for in stacks."""
    model = nn.Module()
    model.experts = unfused(name)
    assert reads.is_replaced(model.experts) is replaced
    assert reads.ConversionView(model, ["experts.0", "fc"]).layers == ["experts.0", "fc"][not replaced :]


# ---- first values ----------------------------------------------------------------------------------------------------


class Begins(nn.Module):
    def __init__(self, word: str) -> None:
        super().__init__()
        self.fc, self.word = nn.Linear(2, 2), word

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            getattr(module, self.word).zero_()


@pytest.mark.parametrize(
    ("word", "packed", "told"), [("weight", 1, 1), ("weight", 0, 0), ("bias", 1, 0), ("gone", 1, 0)]
)
def test_first_values_of_weights_that_are_packed(word: str, packed: int, told: int) -> None:
    model = Begins(word)
    found = reads.values(model, ["fc"][:packed])
    assert found == ("it gives 'fc' first values (Begins._init_weights), which is packed" if told else None)
    assert model.fc.weight is not None


def test_parameters_that_are_integers_are_copied_without_values() -> None:
    model = nn.Module()
    model.codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    model.again, model.plain = model.codes, copy.deepcopy(nn.Linear(2, 2))
    copied: Any = reads.without_values(model)
    assert copied.codes is copied.again and copied.codes.dtype is torch.int8 and copied.codes.is_meta
    assert not copied.plain.weight.requires_grad


@pytest.mark.parametrize(
    ("kind", "dtype", "scheme"),
    [("t5", torch.float16, "ptpc_fp8"), ("hy_v4", torch.bfloat16, "mxfp4"), ("hy_v4", torch.bfloat16, "int4_wo_32")],
)
def test_codes_of_layers_that_are_held_in_float32_stay_codes(
    kind: str, dtype: torch.dtype, scheme: str, tmp_path: Path
) -> None:
    """Its patterns (``_keep_in_fp32_modules``) made float32 of codes: shapes did not fit, or logits were 26 % off."""
    float_model: Any = tiny.made(kind, dict(tiny.model_types())[kind], {}).to(dtype)
    float_model.save_pretrained(tmp_path / "float")
    model = type(float_model).from_pretrained(tmp_path / "float", dtype=dtype)
    assert {x.dtype for x in model.parameters()} == {dtype, torch.float32}
    ModelQuantizer(LLMTemplate.for_model(model).get_config(scheme)).quantize_model(model)
    export_as(model, tmp_path / "m", "quark", tmp_path, program="transformers")
    theirs = type(model).from_pretrained(tmp_path / "m", dtype="auto")
    inputs = tiny.inputs_of(model)
    assert torch.equal(tiny.answer(theirs, inputs), tiny.answer(model, inputs))
    assert theirs._get_dtype_plan(dtype) == model._get_dtype_plan(dtype)
    for own, other in zip(effective(model), effective(theirs), strict=True):
        assert own[0] == other[0] and torch.equal(own[1], other[1])
