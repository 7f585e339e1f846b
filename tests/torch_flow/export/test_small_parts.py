"""Small decisions of the exports, each asked directly: what readers misread, which scales are cast, what goes where.

The models here are stand-ins with as little as a question needs; whole files are read by other programs elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.torch_flow.export.networks import llama
from tests.torch_flow.export.test_reload import layer, quantized
from torch import nn

from quark.errors import ConfigError, ModelError
from quark.numerics.ggml import GGML
from quark.numerics.ggml_bytes import BLOCK, SUPER
from quark.torch.config.type import ScaleType
from quark.torch.export import checkpoint, extras, gguf_tensors, left_out, model_files, places, reader_scales, skeleton
from quark.torch.export import transformers_reads as reads
from quark.torch.export.gguf_tensors import FileLoss, holds, in_blocks, near_float16, squares
from quark.torch.export.stored import StoredScales, StoredTensor
from quark.torch.export.write_as import config_for
from quark.torch.fake_quantize import make_quantizer, parts
from quark.torch.quantization.config.config import (
    FP8E4M3PerTensorSpec,
    Int4PerChannelSpec,
    Int4PerGroupSpec,
    Int8PerTensorSpec,
    QConfig,
    QLayerConfig,
    Uint4PerGroupSpec,
)
from quark.torch.quantization.config.config import QTensorConfig as Spec
from quark.torch.quantization.config.type import Dtype, QSchemeType

pytest.importorskip("transformers")
GROUPS = {"qscheme": QSchemeType.per_group, "ch_axis": -1, "group_size": 32}


# ---- scales in the type of the model ---------------------------------------------------------------------------------


def weight_of(dtype: Dtype, scale_type: ScaleType | None = None, **more: Any) -> Any:
    return Spec(dtype, **{**GROUPS, **more}, scale_type=scale_type)


@pytest.mark.parametrize("scale_type", [None, ScaleType.float, ScaleType.float32, ScaleType.float16])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_that_were_float32_take_the_type_of_the_model(scale_type: ScaleType | None, kind: torch.dtype) -> None:
    config = QConfig(QLayerConfig(weight=weight_of(Dtype.int4, scale_type)))
    found = reader_scales.with_scales_in(config, kind).global_quant_config.weight.scale_type
    taken = {torch.float16: ScaleType.float16, torch.bfloat16: ScaleType.bfloat16}.get(kind)
    assert found == (taken if taken and scale_type is not ScaleType.float16 else scale_type)


CASES = {
    "int4 alone": (QLayerConfig(weight=weight_of(Dtype.int4)), True),
    "uint4 alone": (QLayerConfig(weight=weight_of(Dtype.uint4)), True),
    "int8 alone": (QLayerConfig(weight=weight_of(Dtype.int8)), True),
    "int4 beside inputs": (
        QLayerConfig(weight=weight_of(Dtype.int4), input_tensors=Spec(Dtype.int8, qscheme=QSchemeType.per_tensor)),
        True,
    ),
    "int8 beside inputs": (
        QLayerConfig(weight=weight_of(Dtype.int8), input_tensors=Spec(Dtype.int8, qscheme=QSchemeType.per_tensor)),
        False,
    ),
    "one scale": (QLayerConfig(weight=Spec(Dtype.int4, qscheme=QSchemeType.per_tensor)), False),
    "channels": (QLayerConfig(weight=Spec(Dtype.int4, qscheme=QSchemeType.per_channel, ch_axis=0)), True),
    "fp8": (QLayerConfig(weight=Spec(Dtype.fp8_e4m3, qscheme=QSchemeType.per_channel, ch_axis=0)), False),
    "none": (QLayerConfig(), False),
}


@pytest.mark.parametrize("name", CASES)
def test_which_weights_are_read_with_scales_of_the_model(name: str) -> None:
    given, cast = CASES[name]
    config = QConfig(QLayerConfig(), layer_quant_config={"*.a": given}, layer_type_quant_config={nn.Linear: given})
    found = reader_scales.with_scales_in(config, torch.float16)
    for one in (found.layer_quant_config["*.a"], found.layer_type_quant_config[nn.Linear]):
        assert (one != given) == cast
        if cast:
            assert one == replace(given, weight=replace(given.weight, scale_type=ScaleType.float16))


def test_how_far_a_cast_moves_scales() -> None:
    scale = torch.tensor([1.0, 1 + 2.0**-11, 0.0], dtype=torch.float32)
    assert reader_scales.moved(scale, torch.float16) == pytest.approx(2.0**-11, rel=1e-3)
    assert reader_scales.moved(scale[:1], torch.float16) == 0.0
    assert reader_scales.moved(scale.to(torch.int32), torch.float16) == 0.0
    assert reader_scales.moved(scale[:0], torch.float16) == 0.0
    assert reader_scales.in_type_of_model(scale, torch.float16) is scale
    assert reader_scales.in_type_of_model(scale[:1], torch.float16).dtype is torch.float16
    assert reader_scales.moved(4 * scale, torch.float16) == reader_scales.moved(scale, torch.float16), "a ratio"


def test_of_what_is_stored_only_scales_are_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that moves most counts, wherever it comes; other stored tensors move further here."""
    layers = []
    for away in (2.0**-12, 2.0**-11, 0.0):
        stored = StoredTensor.__new__(StoredTensor)
        nn.Module.__init__(stored)
        stored.register_buffer("scale", torch.tensor([1 + away]))
        stored.register_buffer("zero_point", torch.tensor([1e-9]))
        layers.append(("", SimpleNamespace(weight_quantizer=stored)))
    monkeypatch.setattr(reader_scales, "quantized_layers", lambda model: layers)
    assert reader_scales.worst_cast(nn.Linear(1, 1).half()) == pytest.approx(2.0**-11, rel=1e-3)


@pytest.mark.parametrize(
    ("format", "program", "cast"),
    [("quark", "vllm", True), ("quark", None, False), ("quark", "sglang", False), ("safetensors", "vllm", False)],
)
def test_whose_files_have_scales_of_the_model(format: str, program: str | None, cast: bool) -> None:
    config = QConfig(QLayerConfig(weight=weight_of(Dtype.int4)))
    found = config_for(config, format, program, torch.float16)
    assert (found.global_quant_config.weight.scale_type is ScaleType.float16) == cast


@pytest.mark.parametrize(
    ("format", "program", "cast"),
    [
        ("compressed-tensors", None, True),
        ("compressed-tensors", "transformers", True),
        ("compressed-tensors", "vllm", False),
        ("awq", None, False),
        ("quark", "vllm", False),
    ],
)
def test_whose_files_have_all_scales_in_the_type_of_the_model(format: str, program: str | None, cast: bool) -> None:
    """Those of FP8, too: transformers holds every scale of compressed-tensors so, other readers those of integers."""
    config = QConfig(QLayerConfig(weight=FP8E4M3PerTensorSpec(is_dynamic=False).to_quantization_spec()))
    found = config_for(config, format, program, torch.bfloat16)
    assert (found.global_quant_config.weight.scale_type is ScaleType.bfloat16) == cast


# ---- what transformers makes of a file -------------------------------------------------------------------------------


def scheme(symmetric: bool = True, blocks: bool = False, inputs: bool = False) -> Any:
    weights = SimpleNamespace(symmetric=symmetric, scale_dtype=torch.uint8 if blocks else None)
    return SimpleNamespace(weights=weights, input_activations=object() if inputs else None)


def test_packed_zero_points_are_told() -> None:
    schemes = {"a": scheme(), "b": scheme(symmetric=False)}
    assert reads.zero_points(schemes, ["a"]) is None
    assert "'b'" in str(reads.zero_points(schemes, ["a", "b"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("in_blocks", [True, False])
def test_blocks_come_back_as_bfloat16(dtype: torch.dtype, in_blocks: bool) -> None:
    told = reads.blocks(nn.Linear(2, 2).to(dtype), {"a": scheme(), "b": scheme(blocks=in_blocks)})
    assert (told is None) == (dtype is torch.bfloat16 or not in_blocks)
    assert told is None or ("'b'" in told and str(dtype).removeprefix("torch.") in told)


@pytest.mark.parametrize(
    ("pairs", "named", "expected"),
    [
        ({"head.weight": "words.weight"}, ["head"], "head.weight"),
        ({"head.weight": "words.weight"}, ["words"], "words.weight"),
        ({"head.weight": "words.weight"}, ["other"], None),
        ({"head.bias": "words.bias"}, ["head.bias"], None),
        ({}, ["head"], None),
        (None, ["head"], None),
    ],
)
def test_ties_of_weights_that_are_codes(pairs: Any, named: list[str], expected: str | None) -> None:
    model: Any = SimpleNamespace(all_tied_weights_keys=pairs)
    model.get_input_embeddings = model.get_output_embeddings = nn.Identity
    told = reads.ties(model, dict.fromkeys(named))
    assert (told is None) if expected is None else (f"of which {expected!r} is quantized" in str(told))


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (["a.weight_packed", "a.weight", "b.weight"], True),
        (["a.weight_packed", "a.weight"], False),
        (["a.weight", "b.weight"], False),
        (["a.weight_packed", "*.weight", "b.weight"], False),
        ([], False),
    ],
)
def test_a_join_collects_several_weights(sources: list[str], expected: bool) -> None:
    assert reads.is_join(iter(sources)) == expected


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.zero_()


class Outer(nn.Module):
    def __init__(self, inner: type = Inner) -> None:
        super().__init__()
        self.inner, self.plain = inner(), nn.Sequential(nn.Linear(2, 2))


class Whole(Outer):
    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing."""


def test_who_gives_a_module_its_first_values() -> None:
    model = Outer()
    found = {name: owner for name, _, owner in reads.initialized(model)}
    assert found == {"inner": model.inner, "inner.fc": model.inner}
    whole = Whole()
    found = {name: owner for name, _, owner in reads.initialized(whole)}
    assert found.pop("inner") is found.pop("inner.fc") is whole.inner
    assert set(found) == {"", "plain", "plain.0"} and all(owner is whole for owner in found.values())


def test_first_values_of_packed_layers_are_told() -> None:
    model = Outer()
    model.inner.fc.quantizer = None
    told = reads.values(model, [])
    assert told is None and model.inner.fc.weight is not None
    copied = reads.without_values(model)
    assert all(value.is_meta for value in copied.parameters())
    assert not any(value.is_meta for value in model.parameters())


# ---- first files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignored", [[r"mtp\."], [r"other"], None])
def test_heads_beside_the_model_go_along(ignored: list[str] | None, tmp_path: Path) -> None:
    names = ("mtp.layers.0.weight", "mtp.norm", "x.mtp.a", "y")
    heads = {name: torch.full((2,), float(k)) for k, name in enumerate(names)}
    save_file(heads, tmp_path / "model.safetensors")
    model = llama()
    model.config._name_or_path = str(tmp_path)
    model._keys_to_ignore_on_load_unexpected = ignored
    found = {name: value for item in left_out.left_out_items(model) for name, value in item.make().items()}
    assert set(found) == ({"mtp.layers.0.weight", "mtp.norm", "x.mtp.a"} if ignored == [r"mtp\."] else set())
    assert all(torch.equal(value, heads[name]) for name, value in found.items())
    assert left_out.is_ignored(model, "mtp.x") == (ignored == [r"mtp\."])


def test_a_folder_without_weights_has_no_heads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = llama()
    model.config._name_or_path = str(tmp_path)
    model._keys_to_ignore_on_load_unexpected = [r"mtp\."]
    assert list(left_out.left_out_items(model)) == []


def test_only_what_is_a_head_goes_along(tmp_path: Path) -> None:
    names = ("mtp.layers.0.weight", "mtp.kept", "skipped")
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "a.safetensors")
    model = llama()
    model.config._name_or_path = str(tmp_path)
    model._keys_to_ignore_on_load_unexpected = [r"mtp\.layers", "skipped"]
    assert [name for item in left_out.left_out_items(model) for name in item.form] == ["mtp.layers.0.weight"]


@pytest.mark.parametrize("names", [["b", "a", "c"], ["c", "b"], list("qponmlkjihgfed")])
def test_the_first_tensor_that_is_missing_is_named(names: list[str], tmp_path: Path) -> None:
    save_file({"z": torch.zeros(1)}, tmp_path / "x.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, "z"], "x.safetensors")}))
    with pytest.raises(ModelError, match=f"has no tensor '{min(names)}'"):
        checkpoint.indexed_files(tmp_path, index)
    index.write_text('{"weight_map": {"a": "x.safetensors"}}')
    save_file({name: torch.zeros(1) for name in ["a", *names]}, tmp_path / "x.safetensors")
    with pytest.raises(ModelError, match=f"has a tensor '{min(set(names) - {'a'})}'"):
        checkpoint.indexed_files(tmp_path, index)


def test_what_lies_beside_a_model_goes_along(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    kept = ["tokenizer.json", "vocab.txt", "tokenizer.model", "modeling.py", "chat_template.jinja", "a.spm"]
    kept.append("generation_config.json")  # of a model that has none of its own
    for name in [*kept, "config.json", "model.safetensors.index.json", "README.txt", "a.bin"]:
        (source / name).write_text(name)
    (source / "folder.json").mkdir()
    (target / "vocab.txt").write_text("own")
    model = llama()
    model.config._name_or_path = str(source)
    model_files.copy_beside(model, target)
    assert sorted(path.name for path in target.iterdir()) == sorted(kept)
    assert (target / "vocab.txt").read_text() == "own" and (target / "modeling.py").read_text() == "modeling.py"


# ---- places ----------------------------------------------------------------------------------------------------------


def test_what_a_module_held_says_what_it_holds() -> None:
    module = nn.Linear(2, 2)
    for wanted in (True, False):
        module.weight = nn.Parameter(torch.zeros(2, 2), requires_grad=wanted)
        places.share(module, "weight", torch.ones(2, 2))
        assert isinstance(module.weight, nn.Parameter) and module.weight.requires_grad == wanted
        assert bool((module.weight == 1).all())
    module._parameters["bias"] = None
    places.share(module, "bias", torch.ones(2))
    assert not module.bias.requires_grad
    module.register_buffer("scale", torch.zeros(2))
    assert type(places.share(module, "scale", torch.ones(2))) is torch.Tensor and bool((module.scale == 1).all())
    kept = nn.Parameter(torch.full((2, 2), 3.0))
    assert places.share(module, "weight", kept) is kept is module.weight


@pytest.mark.parametrize(
    ("name", "old", "new", "error"),
    [
        ("w", torch.zeros(2), torch.ones(2), None),
        ("w", torch.zeros(2), torch.ones(2, dtype=torch.float16), None),
        ("w", torch.zeros(2), torch.ones(3), "has the shape"),
        ("w", torch.zeros(2), torch.ones(2, dtype=torch.int8), "is torch.int8"),
        ("w", torch.zeros(2, dtype=torch.int32), torch.ones(2), "is torch.float32"),
        ("w", torch.zeros(2, dtype=torch.uint8), torch.ones(2).to(torch.float8_e4m3fn), None),
        ("w", torch.zeros(2), torch.tensor([1.0, torch.inf]), None),
        ("scale", torch.zeros(2), torch.tensor([1.0, torch.inf]), "not finite"),
        ("scale_1", torch.zeros(2), torch.tensor([1.0, torch.nan]), "not finite"),
        ("scale", torch.zeros(2), torch.tensor([1.0, 2.0]), None),
        ("w", torch.zeros(2, device="meta"), torch.ones(2), None),
        ("w", torch.zeros(0), torch.ones(2), "has the shape"),
    ],
)
def test_a_place_takes_what_fits(name: str, old: torch.Tensor, new: torch.Tensor, error: str | None) -> None:
    module = nn.Module()
    module.register_buffer(name, old)
    if error is not None:
        with pytest.raises(ModelError, match=error):
            places.put(module, name, new, "it")
        return
    if new.numel() != 1:
        with pytest.raises(ModelError, match="has the shape"):
            places.put(module, name, new.reshape(-1)[:1], "it")
    found = places.put(module, name, new, "it")
    assert found is getattr(module, name) and found.dtype == old.dtype and not found.is_meta
    expected = new.view(torch.uint8) if old.dtype == torch.uint8 else new
    assert torch.equal(found.float(), expected.float())


# ---- a model that waits for its tensors ------------------------------------------------------------------------------


@pytest.mark.parametrize("bytes_only", [True, False])
@pytest.mark.parametrize("spec", ["fp8", "int4", "int8"])
def test_codes_of_fp8_may_be_held_as_bytes(bytes_only: bool, spec: str) -> None:
    weight = {
        "fp8": FP8E4M3PerTensorSpec(),
        "int4": Int4PerChannelSpec(0),
        "int8": Int8PerTensorSpec(),
    }[spec]
    made = skeleton.prepared(
        llama(), QConfig(layer(weight), exclude=["lm_head"]), "order", "real_quantized", bytes_only
    )
    found = made.model.layers[0].mlp.up_proj.weight.dtype
    kept = {"fp8": torch.uint8 if bytes_only else torch.float8_e4m3fn, "int4": torch.int32, "int8": torch.int8}
    assert found == kept[spec]


# ---- extras ----------------------------------------------------------------------------------------------------------


def test_rotations_go_into_files_and_come_back() -> None:
    from quark.algorithms.hadamard import rotation

    turned = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).double())[0]
    for turn in (rotation(8, None), rotation(8, 4), extras.Dense(turned)):
        item = extras.turn_item("fc", turn)
        ((name, value),) = item.make().items()
        assert name == "fc.input_rotation" and item.form[name] == (tuple(value.shape), value.dtype)
        assert (value.dtype is torch.int8) == (not isinstance(turn, extras.Dense))
        back = extras.rotation_of(value)
        assert type(back) is type(turn)
        torch.testing.assert_close(extras.matrix_of(back), extras.matrix_of(turn), rtol=0, atol=1e-7)
    signs = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)[[1, 0]]  # a matrix of signs that no construction makes
    torch.testing.assert_close(extras.matrix_of(extras.rotation_of(signs)), signs.double() / 2**0.5)


def test_what_a_file_holds_beside_layers() -> None:
    for names, expected in ((["a.weight"], False), (["a.input_rotation"], True), (["a.correction.l1.weight"], True)):
        assert extras.has_extras(SimpleNamespace(names=names)) == expected  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="holds a part of 'b', which the model does not have"):
        extras.layer_called(nn.Sequential(), "b", SimpleNamespace(folder="here"), {})  # type: ignore[arg-type]


# ---- GGUF ------------------------------------------------------------------------------------------------------------

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_simple_blocks_decode_to_what_went_in(kind: str) -> None:
    rng = np.random.default_rng(0)
    middle = {"Q4_0": 8, "Q4_1": 0, "Q8_0": 0}[kind]
    codes = rng.integers(-127, 128, (3, 64)) if kind == "Q8_0" else rng.integers(0, 16, (3, 64))
    scale = (2.0 ** rng.integers(-6, 3, (3, 2))).astype(np.float32)
    minimum = scale * -3 if kind == "Q4_1" else 0 * scale
    data = in_blocks(kind, codes - middle, scale, minimum)
    found = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    expected = (codes - middle) * np.repeat(scale, 32, axis=1) + np.repeat(minimum, 32, axis=1)
    np.testing.assert_array_equal(found, expected.astype(np.float32))


@pytest.mark.parametrize(
    ("values", "tolerance", "expected"),
    [
        ([1.0, 0.0], 2.0**-10, True),
        ([1.0, 1e-7], 2.0**-10, False),
        ([1e-7], 2.0**-10, False),
        ([7e4], 2.0**-10, False),
        ([1e-5], 2.0**-10, False),
        ([1e-5], 2.0**-7, True),
        ([1 + 2.0**-10], 0.0, True),
        ([1 + 2.0**-11], 0.0, False),
    ],
)
def test_which_scales_float16_has(values: list[float], tolerance: float, expected: bool) -> None:
    assert holds(np.array(values), tolerance) == expected


def test_which_matrices_float16_has() -> None:
    x = np.random.default_rng(0).standard_normal((8, 70000)).astype(np.float32)
    assert near_float16(x) and not near_float16(x * 1e-8) and not near_float16(x * 1e5)
    assert squares(x) == pytest.approx(float(np.square(x.astype(np.float64)).sum()), rel=1e-6)
    assert squares(x[:0]) == 0.0


def test_the_loss_of_a_file() -> None:
    loss = FileLoss(error=9.0, total=100.0)
    assert loss.relative == pytest.approx(0.3) and FileLoss().relative == 0.0


SIGNED = {
    "Q4_1": QLayerConfig(weight=Spec(Dtype.int4, symmetric=False, **GROUPS, scale_type=ScaleType.float16)),
    "Q4_1 unsigned": layer(Uint4PerGroupSpec(-1, 32, scale_type="float16")),
    "Q4_0": layer(Int4PerGroupSpec(-1, 32, scale_type="float16")),
}


@pytest.mark.parametrize("name", SIGNED)
def test_integers_with_a_sign_and_zero_points_keep_their_values(name: str) -> None:
    from quark.torch.export.gguf_tensors import coded_entry, values_of

    model = quantized(llama(), QConfig(SIGNED[name], exclude=["lm_head"]))
    found: Any = model.model.layers[0].mlp.up_proj
    entry = coded_entry("up.weight", "up", found, lambda x: x, lambda: values_of(found, "weight"))
    assert entry is not None and entry.kind == name.split()[0]
    decoded = gguf.quants.dequantize(entry.make()[0], gguf.GGMLQuantizationType[entry.kind])
    wanted = found.weight_quantizer(found.weight.detach()).detach().numpy()
    np.testing.assert_allclose(decoded, wanted, rtol=0, atol=1e-3 * np.abs(wanted).max())


def test_a_scheme_that_no_type_holds_is_named() -> None:
    from quark.torch.export.gguf_tensors import coded_entry

    model = quantized(llama(), QConfig(layer(FP8E4M3PerTensorSpec()), exclude=["lm_head"]))
    with pytest.raises(ConfigError, match="which no GGUF type holds"):
        coded_entry("up.weight", "up", model.model.layers[0].mlp.up_proj, lambda x: x, lambda: np.zeros(1))


@pytest.mark.parametrize(("kind", "length"), [("short", 64), ("long", 65)])
def test_the_factors_of_longrope_are_those_of_transformers(kind: str, length: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from quark.torch.export.gguf_rope import add_rope, long_factors
    from quark.torch.export.gguf_table import ARCHITECTURES

    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1 + number / 8 for number in range(8)], "long_factor": [2.0 + n for n in range(8)]}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=512, rope_parameters=rope)
    frequencies, scale = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=length)
    found = long_factors(config)[f"rope_factors_{kind}"]
    np.testing.assert_allclose(1 / (found * 1e4 ** (np.arange(0, 16, 2) / 16)), frequencies.numpy(), rtol=1e-5)
    told: dict[str, Any] = {}

    class Writer:
        def __getattr__(self, name: str) -> Any:
            return lambda value: told.__setitem__(name, value)

    add_rope(Writer(), config, ARCHITECTURES["llama"])
    assert (told["add_rope_scaling_attn_factors"], told["add_rope_scaling_orig_ctx_len"]) == (scale, 64)


@pytest.mark.parametrize("size", [64, 32])
def test_the_frequencies_of_llama3_are_those_of_transformers(size: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from quark.torch.export.gguf_rope import rope_factors
    from quark.torch.export.gguf_table import ARCHITECTURES

    row = ARCHITECTURES["llama"]
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rope["original_max_position_embeddings"] = 64  # some frequencies below both bounds, some between, some above
    config = LlamaConfig(hidden_size=size * 4, num_attention_heads=4, rope_parameters=rope)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].double().numpy()
    plain = 1.0 / 10000.0 ** (np.arange(0, size, 2) / size)
    found = rope_factors(config, row)
    assert found is not None and found.dtype == np.float32
    np.testing.assert_allclose(found, plain / scaled, rtol=1e-5)
    assert len(set(np.round(found, 3))) > 3
    assert rope_factors(LlamaConfig(hidden_size=64, num_attention_heads=4), row) is None


@pytest.mark.parametrize(
    ("renamed", "hit", "written", "expected"),
    [
        (False, False, 3, False),
        (True, False, 3, True),
        (False, True, 3, True),
        (False, True, 2, False),
        (True, True, 2, False),
        (True, False, 2, True),
    ],
)
def test_experts_that_the_original_has_one_by_one(
    renamed: bool, hit: bool, written: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stacks here: they come apart where more tensors are written, or where each expert has a name of its own."""
    monkeypatch.setattr(reads, "numbered_stacks", lambda module: [{"up": torch.zeros(1), "down": torch.zeros(1)}])
    monkeypatch.setattr(reads, "base_of", lambda name, table: name)
    names: Any = SimpleNamespace(
        hit=lambda name: object() if hit else None,
        layer=lambda name: f"other.{name}" if renamed else name,
        written=lambda form: range(written),
        renamed={},
    )
    assert reads.is_listed("experts", nn.Module(), names) == expected  # type: ignore[arg-type]


def test_what_is_unpacked_is_frozen_and_computes_the_same(tmp_path: Path) -> None:
    from quark.torch.export.api import export_safetensors, import_model_from_safetensors

    model = quantized(llama(), QConfig(layer(Int4PerGroupSpec(-1, 32)), exclude=["lm_head"]))
    export_safetensors(model, tmp_path)
    loaded = import_model_from_safetensors(llama(), tmp_path)
    found: Any = loaded.model.layers[0].mlp.up_proj
    assert found.compact and found.loaded
    ids = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        expected = loaded(ids).logits
        assert skeleton.unpack(loaded) is loaded
        torch.testing.assert_close(loaded(ids).logits, expected)
    assert found.frozen and not found.compact and found.weight.dtype == torch.float32
    assert list(skeleton.compact_layers(loaded)) == []


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a.safetensors"], None),
        ([], "no safetensors file"),
        (["a.safetensors", "b.safetensors"], "2 safetensors files and no index"),
        (["pytorch_model.bin"], r"no safetensors file; pytorch_model.bin may hold pickled weights"),
        (["a.safetensors.index.json", "b.safetensors.index.json"], "has 2 indexes"),
        (["b.safetensors", "a.safetensors", "a.safetensors.index.json"], "two models: 'a.safetensors', and what"),
        (["a.safetensors", "b.safetensors.index.json"], None),
    ],
)
def test_which_files_hold_the_weights(names: list[str], told: str | None, tmp_path: Path) -> None:
    for name in names:
        if name.endswith(".safetensors"):
            save_file({name[0]: torch.zeros(1)}, tmp_path / name)
        else:
            (tmp_path / name).write_text(json.dumps({"weight_map": {names[0][0]: names[0]}}))
    if told is None:
        assert checkpoint.weight_files(tmp_path) == {"a.safetensors": ("a",)}
        return
    with pytest.raises(ModelError, match=told):
        checkpoint.weight_files(tmp_path)


def test_numbers_of_gguf_are_those_of_its_package() -> None:
    from quark.torch.export import gguf_vocabulary as vocabulary
    from quark.torch.export.gguf_model import FILE_TYPES

    types = gguf.LlamaFileType
    for kind, number in FILE_TYPES.items():
        name = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}.get(kind, f"MOSTLY_{kind}")
        names = [name, f"{name}_S", "MOSTLY_Q2_K"] if kind in ("Q3_K", "Q4_K", "Q5_K") else [name]
        assert number in [int(getattr(types, one)) for one in names if hasattr(types, one)] or kind == "MXFP4"
    assert FILE_TYPES["MXFP4"] == 38
    for name in ("NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "UNUSED", "BYTE"):
        assert getattr(vocabulary, name) == int(getattr(gguf.TokenType, name))


def test_the_largest_value_over_the_scale_of_a_gguf_block() -> None:
    """A code of as many bits, for signed ones the lowest, times the largest scale within a super-block."""
    codes = {"Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 127}
    codes |= {"Q2_K": 3 * 15, "Q3_K": 4 * 32, "Q4_K": 15 * 63, "Q5_K": 31 * 63, "Q6_K": 32 * 128}
    assert codes == {row.kind: row.largest * row.units for row in GGML.values()}
    for kind, size in (("Q4_0", 32), ("Q8_0", 32), ("Q4_K", 256), ("Q6_K", 256)):
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] == size
    assert (BLOCK, SUPER) == (32, 256)


def test_how_formats_are_stored() -> None:
    """Bits of a code, the word that they are packed in, and from which end (the peer's files, for 2 and 4 bits)."""
    from quark.numerics.elements import ELEMENTS
    from quark.torch.export.storage import SHIFTS, storage_of

    found = {}
    for name in (
        "int2",
        "uint2",
        "int4",
        "uint4",
        "int3",
        "int8",
        "uint8",
        "int16",
        "fp8_e4m3",
        "fp4_e2m1",
        "fp6_e3m2",
    ):
        made = storage_of(ELEMENTS[name])
        found[name] = (made.bits, made.first, made.reorders, made.transposes, made.dtype.itemsize)
    assert found == {
        "int2": (2, "high", False, True, 1),
        "uint2": (2, "high", False, True, 1),
        "int4": (4, "low", True, True, 4),
        "uint4": (4, "low", True, True, 4),
        "int3": (3, "low", False, False, 1),
        "int8": (0, "low", False, True, 1),
        "uint8": (0, "low", False, True, 1),
        "int16": (0, "low", False, True, 2),
        "fp8_e4m3": (0, "low", False, False, 1),
        "fp4_e2m1": (4, "low", False, False, 1),
        "fp6_e3m2": (6, "low", False, False, 1),
    }
    assert (SHIFTS.bits, SHIFTS.dtype) == (1, torch.uint8)


def test_which_architectures_llama_cpp_has_otherwise() -> None:
    """Facts of llama.cpp: permuted queries and keys, norms plus one, windows, patterns of layers."""
    from quark.torch.export.gguf_table import ARCHITECTURES

    def named(field: str) -> set[str]:
        return {name for name, row in ARCHITECTURES.items() if getattr(row, field)}

    assert named("interleaved") == {
        "llama", "mistral", "mixtral", "granite", "smollm3", "arcee", "granitemoe", "ministral", "ministral3", "olmo",
        "granitemoeshared", "granitemoehybrid", "bamba",
    }  # fmt: skip
    delta = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
    assert named("shifted") == {"gemma", "gemma2", "gemma3_text", "nemotron"} | delta
    assert named("window") == {
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "mimo_v2_flash",
        "gemma4_text",
        "gpt_oss",
        "cohere2",
        "olmo3",
        "modernbert",
        "afmoe",
        "exaone_moe",
    }
    assert (named("around"), named("behind_padding")) == (
        {"modernbert"},
        {"roberta", "xlm-roberta", "camembert"},
    )
    assert {name: ARCHITECTURES[name].period for name in named("period")} == {
        "gemma2": 2,
        "gemma3_text": 6,
        "gemma3n_text": 5,
        "gpt_oss": 2,
        "cohere2": 4,
        "olmo3": 4,
        "modernbert": 3,
        **dict.fromkeys(("exaone_moe", "afmoe", "llama4_text", *delta), 4),
    }
    normed = {name: row.fixed["norm_topk_prob"] for name, row in ARCHITECTURES.items() if "norm_topk_prob" in row.fixed}
    assert normed == {
        "qwen2_moe": False, "qwen3_moe": True, "olmoe": False, "deepseek_v2": False, "lfm2_moe": True,
        "qwen3_vl_moe_text": True, "mimo_v2_flash": True, "kimi_linear": True,
        **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text"), True),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("scales", "fixed"), [((1.0,), True), ((1.0, 2.0), True), ((1.0, None), False), ((None,), False)]
)
def test_values_stay_on_a_grid_all_of_whose_scales_are_known(
    scales: tuple[Any, ...], fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_tensors, "parts", lambda given: [SimpleNamespace(scale=one) for one in given])
    assert gguf_tensors.is_fixed(scales) is fixed  # type: ignore[arg-type]


def _inputs(strategy: str, bits: int, scales: str | None, size: int = 32) -> Any:
    found = SimpleNamespace(strategy=strategy, num_bits=bits, scale_dtype=scales, group_size=size)
    return SimpleNamespace(input_activations=found)


@pytest.mark.parametrize(
    ("scheme", "told"),
    [
        (_inputs("tensor_group", 4, "fp8"), True),
        (_inputs("group", 8, "uint8"), True),
        (_inputs("group", 4, "uint8"), False),
        (_inputs("group", 8, None), False),
        (SimpleNamespace(input_activations=None), False),
    ],
)
def test_blocks_of_inputs_that_transformers_rounds_otherwise(scheme: Any, told: bool) -> None:
    assert (reads.input_blocks({"a": scheme}) is not None) is told


@pytest.mark.parametrize(
    ("name", "size", "scheme", "told"),
    [
        ("a", 48, _inputs("group", 8, None), True),
        ("a", 64, _inputs("group", 8, None), False),
        ("a", 48, _inputs("group", 8, "uint8"), False),
        ("a", 48, _inputs("channel", 8, None), False),
        ("elsewhere", 48, _inputs("group", 8, None), False),
    ],
)
def test_groups_of_inputs_that_transformers_cannot_cut(
    name: str, size: int, scheme: Any, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [("a", SimpleNamespace(in_features=size))]
    monkeypatch.setattr(reads, "quantized_layers", lambda model: layers)
    assert (reads.inputs(nn.Identity(), {name: scheme}) is not None) is told


def test_the_parts_of_inputs_are_those_of_what_a_reload_gave() -> None:
    own, alone = (make_quantizer((Spec(Dtype.int8, qscheme=QSchemeType.per_tensor).to_stage(),), "x") for _ in range(2))
    stored = StoredScales(own, {}, torch.device("cpu"))
    both = nn.ModuleList([stored, alone])
    assert list(parts(both)) == [*parts(own), *parts(alone)] and len(list(parts(own))) == 1
    for quantizer, found in ((None, []), (alone, [*parts(alone)]), (stored, [*parts(own)])):
        pairs = [("weight", both), ("input_tensors", quantizer)]
        assert reads.parts_of_inputs(SimpleNamespace(quantizers=lambda: pairs)) == found  # type: ignore[arg-type]  # noqa: B023


@pytest.mark.parametrize(("methods", "replaced"), [((reads.METHOD,), True), (("other",), False), (None, False)])
def test_experts_are_replaced_where_transformers_says_so(
    methods: tuple[str, ...] | None, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = pytest.importorskip("transformers.quantizers.base")
    lists = {} if methods is None else {"Experts": {"quantization_methods": methods}}
    monkeypatch.setattr(base, "MODULES_TO_PATCH_FOR_QUANTIZATION", lists)
    assert reads.is_replaced(SimpleNamespace(fused_class=type("Experts", (), {}))) is replaced  # type: ignore[arg-type]
