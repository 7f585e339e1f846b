"""Page 002: the three strategies of the torch flow and the configuration for diffusion models, executed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.seeds import text

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from quark.torch import ModelQuantizer  # noqa: E402 (torch is optional)
from quark.torch.quantization import FP8E4M3PerTensorSpec  # noqa: E402
from quark.torch.quantization.config.config import QConfig, QLayerConfig  # noqa: E402
from quark.torch.quantization.config.type import Dtype  # noqa: E402

STRATEGIES = {"2-1": "weight only", "2-2": "dynamic", "2-3": "static"}
LAYERS = 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small OPT of awkward widths under the name of the page, with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": 96, "word_embed_proj_dim": 96, "ffn_dim": 160, "num_hidden_layers": LAYERS}
    config = transformers.OPTConfig(vocab_size=288, max_position_embeddings=40, num_attention_heads=3, **shape)
    place = tmp_path / "facebook" / "opt-125m"
    transformers.OPTForCausalLM(config).save_pretrained(place)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise).save_pretrained(place)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sample(strategy: str) -> tuple[int, str]:
    """The page's sample with one strategy taken out of its comments."""
    start, code = text.block("002", "# 1. Set model", "quant_model = quantizer.quantize_model(")
    lines = code.split("\n")
    marks = [n for n, line in enumerate(lines) if line.startswith("# 2-")] + [
        next(n for n, line in enumerate(lines) if line.startswith("# 3."))
    ]
    for begin, end in pairwise(marks):
        if lines[begin].startswith(f"# {strategy}"):
            lines[begin + 1 : end] = text.uncommented("\n".join(lines[begin + 1 : end])).split("\n")
    return start, "\n".join(lines)


def quantized(strategy: str) -> tuple[Any, Any]:
    """The model of the sample, and the float one's answer."""
    given: dict[str, Any] = {}
    exact = transformers.AutoModelForCausalLM.from_pretrained("facebook/opt-125m").eval()
    exec(compile(sample(strategy)[1], "002", "exec"), given)
    return given["quant_model"], exact


def ids(seed: int = 1) -> Any:
    return torch.randint(0, 256, (1, 17), generator=torch.Generator().manual_seed(seed))


@text.needed
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sample(strategy: str, folder: Path) -> None:
    model, exact = quantized(strategy)
    with torch.no_grad():
        found, wanted = (one(ids()).logits.double() for one in (model, exact))
    noise = (found - wanted).square().sum() / wanted.square().sum()
    assert 0 < noise < (0.05 if strategy == "2-1" else 0.02)


@text.needed
def test_only_weights_are_quantized(folder: Path) -> None:
    """An activation of any size passes as it is."""
    model, _ = quantized("2-1")
    layer = model.model.decoder.layers[0].fc1
    x = torch.randn(3, layer.in_features) * 1e4
    with torch.no_grad():
        assert torch.allclose(layer(2 * x) - layer(0 * x), 2 * (layer(x) - layer(0 * x)), rtol=1e-4)


@text.needed
def test_dynamic_ranges_follow_the_input_and_static_ones_do_not(folder: Path) -> None:
    outputs = {}
    for strategy in ("2-2", "2-3"):
        layer = quantized(strategy)[0].model.decoder.layers[0].fc1
        x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            small, large = (layer(factor * x) - layer(0 * x) for factor in (1.0, 1000.0))
        outputs[strategy] = float((large / 1000 - small).norm() / small.norm())
    assert outputs["2-2"] < 0.01 < 0.3 < outputs["2-3"]


@text.needed
def test_modules_are_replaced_in_place(folder: Path) -> None:
    given: dict[str, Any] = {}
    exec(compile(sample("2-1")[1], "002", "exec"), given)
    assert given["quant_model"] is given["model"]


@text.needed
def test_the_configuration_for_diffusion() -> None:
    start = next(n for n, line in enumerate(text.lines("002"), 1) if "FP8E4M3PerTensorSpec" in line)
    _, code = text.block("002", "from quark.torch.quantization import", "quant_config =", start)
    given: dict[str, Any] = {}
    exec(compile(code, "002", "exec"), given)
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.SiLU(), torch.nn.Linear(40, 11, bias=False)).eval()
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        exact = model(x)
        done = ModelQuantizer(given["quant_config"]).quantize_model(model, None)
        for factor in (1.0, 1e-4, 1e4):  # timesteps of very different magnitudes
            wanted = exact if factor == 1 else None
            found = done(factor * x)
            assert torch.isfinite(found).all()
            if wanted is not None:
                assert float((found - wanted).norm() / wanted.norm()) < 0.08


def test_the_dynamic_default_for_diffusion_beats_static_ranges_over_timesteps() -> None:
    spec = FP8E4M3PerTensorSpec(is_dynamic=True).to_quantization_spec()
    assert (spec.is_dynamic, spec.dtype) == (True, Dtype.fp8_e4m3)
    torch.manual_seed(0)
    steps = [torch.randn(8, 24) * scale for scale in (1e-3, 1e-2, 1e-1, 1.0, 10.0, 300.0)]
    errors = {}
    for dynamic in (True, False):
        torch.manual_seed(1)
        layer = torch.nn.Sequential(torch.nn.Linear(24, 11, bias=False)).eval()
        with torch.no_grad():
            wanted = [layer(x) for x in steps]
            one = FP8E4M3PerTensorSpec(is_dynamic=dynamic).to_quantization_spec()
            weight = FP8E4M3PerTensorSpec(is_dynamic=False).to_quantization_spec()
            done = ModelQuantizer(
                QConfig(global_quant_config=QLayerConfig(weight=weight, input_tensors=one))
            ).quantize_model(layer, steps)
            errors[dynamic] = max(float((done(x) - y).norm() / y.norm()) for x, y in zip(steps, wanted, strict=True))
    assert errors[True] < 0.1 < errors[False]


@pytest.mark.parametrize("scheme", ["per_tensor", "per_channel", "per_group", "per_token"])
def test_dynamic_scales_may_be_finer(scheme: str) -> None:
    """A scale per channel, group or token of each forward pass."""
    from quark.torch.quantization.config.config import QTensorConfig
    from quark.torch.quantization.config.type import QSchemeType

    qscheme = {"per_token": "per_channel"}.get(scheme, scheme)
    axis = {
        "per_tensor": {},
        "per_channel": {"ch_axis": 1},
        "per_token": {"ch_axis": 0},
        "per_group": {"ch_axis": -1, "group_size": 8},
    }[scheme]
    observer = {"per_tensor": "PerTensorMinMaxObserver", "per_group": "PerGroupMinMaxObserver"}.get(
        scheme, "PerChannelMinMaxObserver"
    )
    from quark.torch.quantization.observer import observer as observers

    spec = QTensorConfig(
        dtype=Dtype.int8,
        qscheme=QSchemeType[qscheme],
        symmetric=True,
        is_dynamic=True,
        observer_cls=getattr(observers, observer),
        **axis,
    )
    model = torch.nn.Sequential(torch.nn.Linear(24, 11)).eval()
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(3)) * torch.logspace(-1, 1, 5)[:, None]
    with torch.no_grad():
        wanted = model(x)
        found = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(input_tensors=spec))).quantize_model(
            model, None
        )(x)
    assert float((found - wanted).norm() / wanted.norm()) < 0.03


def test_very_few_bits_have_svdquant() -> None:
    from quark.torch.quantization.config.config import SVDQuantConfig

    assert "svdquant" in SVDQuantConfig().name
