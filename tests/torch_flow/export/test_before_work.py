"""A refusal of a format never comes after the work, and what can be written is not refused before it.

Every scheme of the table of weights, mixed layers, experts, row lengths and algorithms, in every format: asked before,
quantized, and written.
"""

from __future__ import annotations

import copy
import logging
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from tests.consumers import tiny
from tests.torch_flow.export.schemes import every
from tests.torch_flow.export.test_gguf import bpe  # noqa: F401
from tests.torch_flow.export.test_refused_before import outcome
from torch import nn

from quark.errors import QuarkError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.config.algorithms import RotationConfig, SVDQuantConfig
from quark.torch.export import onnx_says
from quark.torch.export.before_work import check_before_work
from quark.torch.export.onnx_marks import quantizers_of
from quark.torch.export.onnx_nodes import nodes_of
from quark.torch.export.write_as import export_as
from quark.torch.quantization import QConfig, QLayerConfig

pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")
WRITTEN = ("awq", "gptq", "fp8", "modelopt", "compressed-tensors", "gguf")
SCHEMES = every()
SOME = sorted(SCHEMES)[::20]  # of the table
ROWS = {"vocab_size": 300, "norm_topk_prob": True}
MIXED = {
    "none": {},
    "layer": {"layer_config": {"*v_proj": "int8_wo_per_channel"}},
    "expert": {"layer_config": {"*experts.1.*": "int8_wo_per_channel"}},
    "float expert": {"exclude_layers": ["lm_head", "*gate", "*experts.1.*"]},
}
LEFT = {
    "r4": RotationConfig(r4=True, only_if_better=False),
    "online": RotationConfig(online_r1_rotation=True, only_if_better=False),
    "svdquant": SVDQuantConfig(svd_rank=2, min_layer_size=8),
    "nothing": RotationConfig(r2=True, only_if_better=False),
}


@cache
def model_of(kind: str, inner: int = 128) -> nn.Module:
    """A small random model, whose feed-forward part has rows of ``inner`` numbers."""
    sizes = {**ROWS, "intermediate_size": inner, "moe_intermediate_size": inner}
    return tiny.made(kind, dict(tiny.model_types())[kind], sizes)


def said(model: nn.Module, config: QConfig, format: str, folder: Path, output: Path) -> tuple[str, str]:
    """What is said before the work, and by the export after it."""
    first = outcome(lambda: check_before_work(model, config, format, None, folder))
    ours = ModelQuantizer(config).quantize_model(copy.deepcopy(model), [tiny.inputs_of(model)])
    return first, outcome(lambda: export_as(ours, output, format, folder, verify=False))


def source_of(model: nn.Module, tokenizer: Path, folder: Path) -> Path:
    """A folder with the model and a tokenizer."""
    model.save_pretrained(folder)
    for file in tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("format", WRITTEN)
@pytest.mark.parametrize("inner", [128, 80])
def test_every_scheme_of_weights(format: str, inner: int, bpe: Path, tmp_path: Path) -> None:  # noqa: F811
    model, answers = model_of("llama", inner), set()
    source = source_of(model, bpe, tmp_path / "source")
    for number, name in enumerate(SOME):
        config = QConfig(QLayerConfig(weight=SCHEMES[name]), exclude=["lm_head"])
        if outcome(lambda config=config: ModelQuantizer(config).check(model)):
            continue  # refused by the flow itself
        first, last = said(model, config, format, source, tmp_path / str(number))
        assert bool(first) is bool(last) or "has a zero point of 0" in last, (name, first, last)
        answers.add(bool(first))
    assert True in answers


@pytest.mark.parametrize("format", WRITTEN)
@pytest.mark.parametrize("mix", MIXED)
def test_layers_and_experts_of_several_schemes(mix: str, format: str, bpe: Path, tmp_path: Path) -> None:  # noqa: F811
    kind = "llama" if mix in ("none", "layer") else "qwen3_moe"
    model = model_of(kind)
    config = LLMTemplate.for_model(model).get_config("int4_wo_32", **MIXED[mix])
    first, last = said(model, config, format, source_of(model, bpe, tmp_path / "source"), tmp_path / "out")
    assert bool(first) is bool(last), (first, last)
    assert not first or (mix, format) != ("none", "gguf")
    assert format != "gguf" or ("experts of one layer have the types" in first) is ("expert" in mix)


@pytest.mark.parametrize("algorithm", LEFT)
@pytest.mark.parametrize("format", WRITTEN)
def test_algorithms_that_leave_something_beside_layers(
    format: str, algorithm: str, bpe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture  # noqa: F811
) -> None:  # fmt: skip
    caplog.set_level(logging.ERROR)
    model = model_of("llama")
    scheme = "fp8" if format in ("fp8", "modelopt") else "int4_wo_32"
    config = LLMTemplate.for_model(model).get_config(scheme)
    config.algo_config = [LEFT[algorithm]]
    first, last = said(model, config, format, source_of(model, bpe, tmp_path / "source"), tmp_path / "out")
    assert (bool(first), bool(last)) == (algorithm != "nothing", algorithm != "nothing"), (first, last)
    readers = [None, "vllm", "transformers"]
    found = {name: outcome(partial(check_before_work, model, config, "quark", name, tmp_path)) for name in readers}
    assert not found.pop(None) and all(("does not hold" in text) is (algorithm != "nothing") for text in found.values())


@pytest.mark.parametrize("slot", ["weight", "input_tensors"])
def test_every_scheme_in_onnx(slot: str) -> None:
    """What is said before is what the nodes say; samples give every scale."""
    model, refused = nn.Sequential(nn.Linear(48, 32)), 0
    for name, spec in SCHEMES.items():
        try:
            config = QConfig(QLayerConfig(**{slot: spec}))
            ModelQuantizer(config).check(model)
        except QuarkError:
            continue  # refused by the flow itself
        first = outcome(lambda config=config: onnx_says.check_before(model, config))
        ours = ModelQuantizer(config).quantize_model(copy.deepcopy(model), [torch.randn(4, 48)])
        last = outcome(lambda ours=ours: [nodes_of(marked, "x") for marked in quantizers_of(ours)])
        assert bool(first) is bool(last) or "int32 has no zero points" in last, (name, first, last)
        refused += bool(last)
    assert refused


@pytest.mark.parametrize("command", ["quantize", "quantize-files"])
def test_commands_refuse_before_the_samples_are_run(
    command: str, bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from quark.__main__ import main

    quantizer, files = "quark.torch.quantizer.ModelQuantizer", "quark.torch.files.quantize"
    for place in (f"{quantizer}.quantize_model", f"{files}.quantize_checkpoint"):
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("it was quantized"))
    source = source_of(model_of("llama", 80), bpe, tmp_path / "source")
    given = [str(source), "-o", str(tmp_path / "out"), "--scheme", "int8_wo_per_channel", "--format", "gguf"]
    assert main(["torch", command, *given]) != 0
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "has rows of 80 numbers" in told and not (tmp_path / "out").exists()


#: What a copy without values does not run through to the layers in question.
AXES_BY_VALUES = ("squeezebert", "big_bird", "luke", "canine", "switch_transformers", "higgs_audio_v2")


@pytest.mark.parametrize("name", ["opt", "prophetnet", "layoutlm", "llama", "vit", "vitdet", "clip", *AXES_BY_VALUES])
def test_inputs_of_other_axes_are_told_before(name: str, tmp_path: Path) -> None:
    """OPT flattens tokens before its feed-forward layers: transformers' scales per token would be shared there, as in
    the pooled picture of ViT and the windows of ViTDet (0.7 and 5 % of the answers)."""
    model = tiny.tiny_model(name, dict(tiny.model_types())[name])
    model.save_pretrained(tmp_path / "source")
    config = LLMTemplate.for_model(model).get_config("ptpc_int8")
    first, last = said(model, config, "compressed-tensors", tmp_path / "source", tmp_path / "out")
    assert first == last and ("axes" in first) is (name != "llama")
