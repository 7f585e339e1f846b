"""Decisions of the exports on both sides of each bound, by definitions written out here, or by other programs.

What whole files rarely meet: groups of one kind beside another, names under several paths, tensors at odd addresses.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.torch_flow.export.networks import llama
from tests.torch_flow.export.test_layout import quantizer_for
from tests.torch_flow.export.test_reload import LLM, layer, quantized
from torch import nn

from quark.config import file_formats as formats
from quark.errors import ConfigError, ModelError
from quark.torch import export_safetensors, import_model_from_safetensors
from quark.torch.export import (
    declared,
    decoded,
    extras,
    gguf_tensors,
    modelopt,
    onnx_model,
    state,
    verify,
)
from quark.torch.export import stacked_blocks as stacks
from quark.torch.export.layout import layout_of_quantizer
from quark.torch.export.shards import Item
from quark.torch.quantization.config.config import (
    FP4PerGroupSpec,
    FP8E4M3PerChannelSpec,
    FP8E4M3PerTensorSpec,
    Int4PerChannelSpec,
    Int4PerGroupSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
    ScaleQuantSpec,
    Uint4PerGroupSpec,
)
from quark.torch.quantized_layer import quantized_layers

pytest.importorskip("transformers")
DRAW = np.random.default_rng(16)

# ---- names and bytes -------------------------------------------------------------------------------------------------

NVFP4 = ScaleQuantSpec(FP4PerGroupSpec(-1, 16), FP8E4M3PerTensorSpec())
TWO_STAGES = [FP8E4M3PerTensorSpec().to_quantization_spec(), Int4PerChannelSpec(0).to_quantization_spec()]


@pytest.mark.parametrize(
    ("weight", "names"),
    [
        (Int4PerGroupSpec(-1, 32).to_quantization_spec(), {"", "scale", "zero_point"}),
        (FP8E4M3PerTensorSpec().to_quantization_spec(), {"", "scale"}),
        (OCP_MXFP4Spec(-1, False).to_quantization_spec(), {"", "scale"}),
        (NVFP4.to_quantization_spec(), {"", "scale", "scale_2"}),
        (TWO_STAGES, {"", "scale", "scale_2", "zero_point_2"}),
    ],
)  # fmt: skip
def test_the_first_stage_has_plain_names_and_the_second_numbered_ones(weight: Any, names: set[str]) -> None:
    x = torch.randn(8, 64)
    assert set(layout_of_quantizer(quantizer_for(weight, x), (8, 64)).form()) == names


@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("size", [8, 12, 16, 17])
def test_equal_bytes_at_any_address_are_equal(offset: int, size: int) -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    found, wanted = memory[offset : offset + size], memory[offset : offset + size].clone()
    verify.check("x", found, wanted)
    wanted[-1] += 1
    with pytest.raises(ModelError, match="1 of"):
        verify.check("x", found, wanted)


@pytest.mark.parametrize("part", [11, 12, 13])
def test_three_windows_are_a_quarter_at_most(part: int) -> None:
    """12 windows that are just all rows: three of them are a quarter."""
    rows = 128 * part
    runs = verify.windows((rows, 1 << 15), 1, part).runs
    assert len(runs) == (3 if part >= 12 else 1) and {count for _, count in runs} == {128}


def test_tensors_that_go_together_fill_a_step() -> None:
    limit = 4 * verify.WHOLE
    given = [
        ("a", limit),
        ("a", 1),
        ("b", limit - 1),
        ("b", 1),
        ("b", 1),
        (None, 1),
        ("a", limit * 2),
        ("c", limit * 2),
    ]
    tasks: list[Any] = [SimpleNamespace(key=key, size=size, number=k) for k, (key, size) in enumerate(given)]
    found = [group.tasks for group in verify.grouped(tasks)]
    assert sorted(one.number for group in found for one in group) == list(range(len(tasks)))  # type: ignore[attr-defined]
    assert all(group and len({one.key for one in group}) == 1 for group in found)
    assert all(len(group) == 1 or sum(one.size for one in group) <= limit for group in found)
    assert [len(group) for group in found if group[0].key == "b"] == [2, 1]


@pytest.mark.parametrize("off", [None, "a value", "a row", "alone", "of another program"])
def test_what_is_decoded_at_once_is_compared_one_by_one_where_it_differs(
    off: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[torch.Tensor] = []

    def task(kind: type, rows: int) -> Any:
        made = kind.__new__(kind)
        made.windows, made.compare = SimpleNamespace(count=rows), compared.append
        return made

    kinds = {"alone": [verify.Decoded], "of another program": [verify.Decoded, verify.CodedSlot]}
    tasks = [task(kind, 2 + k) for k, kind in enumerate(kinds.get(str(off), [verify.Decoded] * 2))]
    wanted = torch.arange(sum(one.windows.count for one in tasks) * 2.0).reshape(-1, 2)
    found = wanted.to(torch.float64)
    found = found[:-1] if off == "a row" else found + (off == "a value")
    monkeypatch.setattr(verify, "computed", lambda tasks: wanted)
    monkeypatch.setattr(verify, "restored", lambda own, rows: found)
    verify.Together(tasks)()
    assert [len(rows) for rows in compared] == ([] if off is None else [one.windows.count for one in tasks])
    assert not compared or torch.equal(torch.cat(compared), wanted)


def test_layers_that_a_format_does_not_have_are_compared_as_they_are() -> None:
    made = quantized(llama(), QConfig(layer(Int8PerTensorSpec()), exclude=["lm_head"]))
    name = "model.layers.0.mlp.up_proj"
    foreign = decoded.Foreign({"codes": f"{name}.codes"}, lambda parts: parts["codes"], decoded.rows_cut)
    names: Any = SimpleNamespace(layer=lambda one: one)
    items = [Item({f"{name}.codes": ((1,), torch.int8)}, dict), Item({"other.weight": ((1,), torch.int8)}, dict)]
    tasks = list(verify.tasks_of(None, made, items, names, "order", {name: foreign}))  # type: ignore[arg-type]
    assert [[one.prefix for one in task.tasks] for task in tasks if isinstance(task, verify.Together)] == [
        [f"{name}.weight"]
    ]
    assert [task.item for task in tasks if isinstance(task, verify.Compared)] == items[1:]


# ---- what a model holds ----------------------------------------------------------------------------------------------


def test_tensors_that_are_the_same_and_others() -> None:
    x = torch.randn(4, 6)
    assert state.identity(x) == state.identity(x.view(4, 6)) != state.identity(x.clone())
    assert state.identity(x) != state.identity(x[:2]) and state.identity(x) != state.identity(x.T)
    for one, other in ((torch.empty(0), torch.empty(0)), (x.to("meta"), x.to("meta"))):
        assert state.identity(one) == state.identity(one) != state.identity(other)
    with torch.no_grad():
        assert len(state.identity(x)) > 1 == len(state.identity(x[:0]))


def test_a_layer_under_two_paths_has_two_names() -> None:
    one = nn.Linear(2, 2)
    model = nn.Sequential(one, nn.ReLU(), one)
    assert list(state.names_of(model, {"0": one})) == ["0", "2"]  # type: ignore[dict-item]


def test_memory_that_begins_well_stays() -> None:
    """Only floats that begin between two lines are copied."""
    memory = torch.zeros(64, dtype=torch.float32)
    start = -memory.data_ptr() // 4 % 16
    model = nn.Module()
    model.even = nn.Parameter(memory[start : start + 4])
    model.odd = nn.Parameter(memory[start + 5 : start + 9])
    model.register_buffer("codes", memory.view(torch.int32)[start + 5 : start + 9])
    model.register_buffer("far", torch.zeros(3, device="meta"))
    before = {name: value.data_ptr() for name, value in (*model.named_parameters(), *model.named_buffers())}
    extras.align(model)
    after = {name: value.data_ptr() for name, value in (*model.named_parameters(), *model.named_buffers())}
    assert {name for name in before if before[name] != after[name]} == {"odd"} and after["odd"] % 64 == 0


# ---- formats of others, by their definitions -------------------------------------------------------------------------


def bits_of(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 words [.., n] as codes [.., n * 32 / bits], the lowest bits first."""
    every = (words.view(np.uint32)[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    codes = every.reshape(*words.shape[:-1], -1, bits)
    return (codes << np.arange(bits)).sum(-1).astype(np.int64)


def words_of(shape: tuple[int, ...]) -> np.ndarray:
    return DRAW.integers(-(2**31), 2**31, shape).astype(np.int32)


def test_awq_by_its_definition() -> None:
    """Words along the outputs; nibble k of a word is output 0, 2, 4, 6, 1, 3, 5, 7."""
    qweight, qzeros, scales = words_of((64, 2)), words_of((2, 2)), DRAW.random((2, 16)).astype(np.float32)
    order = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])
    codes, zeros = (bits_of(x, 4).reshape(-1, 2, 8)[:, :, order].reshape(-1, 16) for x in (qweight, qzeros))
    wanted = [[(codes[i, o] - zeros[i // 32, o]) * scales[i // 32, o] for i in range(64)] for o in range(16)]
    given = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    found = decoded.awq_values({key: torch.from_numpy(value) for key, value in given.items()})
    assert np.allclose(found.numpy(), np.array(wanted), rtol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("lowered", [0, 1])
def test_gptq_by_its_definition(bits: int, lowered: int) -> None:
    """Words along the inputs; zero points along the outputs; the group of every input by ``g_idx``."""
    rows, columns, groups = 32, 64, 2
    qweight, qzeros = words_of((columns * bits // 32, rows)), words_of((groups, rows * bits // 32))
    scales, index = DRAW.random((groups, rows)).astype(np.float32), DRAW.integers(0, groups, columns).astype(np.int32)
    codes, zeros = bits_of(np.ascontiguousarray(qweight.T), bits), bits_of(qzeros, bits) + lowered
    wanted = np.array([[(codes[o, i] - zeros[index[i], o]) * scales[index[i], o] for i in range(columns)]
                       for o in range(rows)])  # fmt: skip
    given = {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": index}
    parts = {key: torch.from_numpy(value) for key, value in given.items()}
    assert np.allclose(decoded.gptq_decoder(bits, lowered)(parts).numpy(), wanted, rtol=1e-6)


def test_rows_and_columns_of_parts() -> None:
    windows = verify.windows((1536, 1 << 15), 1, 12)
    rows = [start + k for start, count in windows.runs for k in range(count)]
    part = {
        "weight": torch.arange(3072).reshape(1536, 2),
        "two": torch.arange(6).reshape(2, 3)[:1],
        "scale": torch.ones(()),
    }
    part["weight_shape"] = torch.tensor([1536, 7])
    found = decoded.rows_cut(part, windows)
    assert torch.equal(found["weight"], part["weight"][rows]) and found["weight_shape"].tolist() == [len(rows), 7]
    assert torch.equal(found["two"], part["two"]) and found["scale"].shape == ()
    across = decoded.columns_cut({"scales": part["weight"].T, "index": torch.arange(5)}, windows)
    assert torch.equal(across["scales"], part["weight"].T[:, rows]) and across["index"].tolist() == list(range(5))


@pytest.mark.parametrize(
    ("said", "method"),
    [
        ({"quant_algo": "FP8"}, "modelopt"),
        ({"config_groups": {}, "bits": 4}, "compressed-tensors"),
        ({"quant_algo": "FP8", "quant_method": "other"}, "other"),
        ({"bits": 4}, None),
        ({"bits": 4, "quant_method": "awq"}, "awq"),
    ],
)
def test_descriptions_without_a_method(said: dict[str, Any], method: str | None, tmp_path: Any) -> None:
    for config in ({"quantization_config": said}, {"text_config": {"compression_config": said}}):
        found = declared.declared(tmp_path, config, ["a.weight_scale"])
        assert found is not None and found.get("quant_method") == method and {**found, **said} == found


@pytest.mark.parametrize("spec", [Int8PerTensorSpec(), FP8E4M3PerTensorSpec(), FP8E4M3PerChannelSpec(-1)])
def test_caches_of_modelopt_are_fp8(spec: Any) -> None:
    fp8, cache = FP8E4M3PerTensorSpec().to_quantization_spec(), spec.to_quantization_spec()
    caches = {"*k_proj": QLayerConfig(output_tensors=cache)}
    config = QConfig(QLayerConfig(weight=fp8, input_tensors=fp8), kv_cache_quant_config=caches)
    if cache == fp8:
        assert modelopt.modelopt_config(config, [])["kv_cache_scheme"] is not None
        return
    with pytest.raises(ConfigError, match="keys and values must be fp8 per_tensor"):
        modelopt.modelopt_config(config, [])


def test_a_scheme_that_nobody_knows_works_nowhere() -> None:
    for format in formats.FORMATS:
        for program in (None, *formats.PROGRAMS):
            assert formats.works("no scheme at all", format, program) is False


def test_stacks_have_the_rows_of_gate_and_up_in_turn() -> None:
    """Row 2 k of a stack is row k of the gate, row 2 k + 1 that of up; biases likewise."""
    experts = [["e.0.gate", "e.0.up"], ["e.1.gate", "e.1.up"]]
    codes = {name: torch.randint(0, 256, (3, 32), dtype=torch.uint8) for group in experts for name in group}
    scales = {name: torch.randint(0, 256, (3, 2), dtype=torch.uint8) for name in codes}
    biases = {name: torch.randn(3, dtype=torch.float64) for name in codes}
    items = {}
    for name in codes:
        made = {f"{name}.weight": codes[name], f"{name}.weight_scale": scales[name]}
        items[f"{name}.weight"] = Item({key: (tuple(x.shape), x.dtype) for key, x in made.items()}, made.copy)
        items[f"{name}.bias"] = Item({f"{name}.bias": ((3,), torch.float64)}, {f"{name}.bias": biases[name]}.copy)
    for item, parts in (
        (stacks.coded_stack("gate_up", experts, items), {"blocks": codes, "scales": scales}),
        (stacks.bias_stack("gate_up", experts, items), {"bias": biases}),
    ):
        found = item.make()
        assert {key: (tuple(x.shape), x.dtype) for key, x in found.items()} == item.form
        for role, values in parts.items():
            for number, group in enumerate(experts):
                for row in range(6):
                    wanted = values[group[row % 2]][row // 2]
                    assert torch.equal(found[f"gate_up_{role}"][number][row].reshape(wanted.shape), wanted)


# ---- GGUF ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "near"), [(25.25, False), (1000.5, True), (3000.0, True), (0.4, False)])
def test_a_matrix_below_the_digits_of_float16(steps: float, near: bool) -> None:
    """So many of the smallest steps of float16, which rounds them to a whole one: a hundredth is lost, or less."""
    assert gguf_tensors.near_float16(np.full((2, 32), steps * 2.0**-24, np.float32)) is near


STEP = 2.0**-20  # a scale below the digits of float16
WASTED = {
    "int4": (Int4PerGroupSpec(-1, 32), 3.99, 4.0, -4.0),
    "uint4": (Uint4PerGroupSpec(-1, 32), 7.99, 8.0, -8.0),
}


@pytest.mark.parametrize("name", WASTED)
@pytest.mark.parametrize("case", ["less", "half", "below", "zeros", "large scale", "other group", "among large"])
def test_scales_that_leave_half_of_their_codes(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one group among others: the values reach over less than half of the codes of a small scale."""
    spec, less, half, below = WASTED[name]
    x = torch.full((3, 96), 1000 * STEP)
    x[0, 0] = -x[0, 0]
    value = {"less": less, "half": half, "below": below, "zeros": 0.0}.get(case, less)
    x[1, 64:] = 0.0
    x[1, 70] = value * STEP
    if case == "other group":
        x[1, 64:] = 1000 * STEP
    layout: Any = layout_of_quantizer(quantizer_for(spec.to_quantization_spec(), torch.randn(3, 96)), (3, 96), "order")
    monkeypatch.setattr(gguf_tensors, "source_of", lambda layer: x)
    scale = torch.full((3, 3), 2.0**-14 if case == "among large" else STEP)
    scale[1, 2] = 2.0**-14 if case == "large scale" else STEP
    assert gguf_tensors.wastes_codes(None, scale, layout) is (case in ("less", "among large"))  # type: ignore[arg-type]


# ---- models that come back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4", "fp8", "mxfp4", "two stages", "nvfp4"])
def test_a_model_that_came_back_is_written_as_it_was(name: str, tmp_path: Path) -> None:
    """The same files again; and, as floats, the values that it computes with."""
    weight = {"two stages": TWO_STAGES, "nvfp4": NVFP4.to_quantization_spec()}.get(name)
    given = LLM[name] if weight is None else QLayerConfig(weight=weight)
    made = quantized(llama(), QConfig(given, exclude=["lm_head"]))
    export_safetensors(made, tmp_path / "first")
    back = import_model_from_safetensors(llama(), tmp_path / "first")
    export_safetensors(back, tmp_path / "second")
    files = [(tmp_path / one / "model.safetensors").read_bytes() for one in ("first", "second")]
    assert files[0] == files[1]
    export_safetensors(back, tmp_path / "values", weight_format="fake_quantized")
    values = load_file(tmp_path / "values" / "model.safetensors")
    for path, one in quantized_layers(made):
        assert torch.equal(values[f"{path}.weight"], one.weight_quantizer(one.weight)), path  # type: ignore[operator]


class TwoNames(nn.Module):
    def forward(self, a: Any, b: Any = None) -> Any:
        return a


class AnyNames(nn.Module):
    def forward(self, **named: Any) -> Any:
        return named


@pytest.mark.parametrize(
    ("model", "given", "arguments", "named"),
    [
        (TwoNames(), ({"a": 1, "b": 2},), (), {"a": 1, "b": 2}),
        (TwoNames(), ({"a": 1},), (), {"a": 1}),
        (TwoNames(), (1, {"b": 2}), (1,), {"b": 2}),
        (TwoNames(), ({"c": 1},), ({"c": 1},), {}),
        (TwoNames(), ({"a": 1, "c": 1},), ({"a": 1, "c": 1},), {}),
        (TwoNames(), {"a": 1}, (), {"a": 1}),
        (TwoNames(), 1, (1,), {}),
        (TwoNames(), (), (), {}),
        (AnyNames(), ({"c": 1},), (), {"c": 1}),
    ],
)
def test_a_mapping_at_the_end_is_keywords_or_an_argument(
    model: nn.Module, given: Any, arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    assert onnx_model.called_with(model, given) == (arguments, named)
