"""Decisions of the exports that whole files rarely meet: each asked directly, of every value that it tells apart."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quark.config import file_formats as formats
from quark.errors import ConfigError, ModelError
from quark.numerics.granularity import Group
from quark.torch.export import (
    custom_modes,
    declared,
    decoded,
    gguf_architectures,
    gguf_model,
    gguf_size,
    gguf_tensors,
    gguf_vocabulary,
    gptq,
    model_files,
    onnx_run,
    shards,
    stacked_blocks,
    state,
    transformers_reads,
    verify,
    vllm_reads,
)
from quark.torch.export.gguf_tensors import FileLoss, GGUFTensor
from quark.torch.quantization.config.config import (
    Int4PerChannelSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
    Uint4PerGroupSpec,
)

ONE = 1 << 15  # columns: every row more than the elements that are decoded as a whole


@pytest.mark.parametrize("unit", [1, 16, 48])
@pytest.mark.parametrize("rows", [1, 47, 48, 96, 768, 1536, 6144, 6145, 9600, 98304])
def test_windows_are_whole_units_of_a_large_tensor(rows: int, unit: int) -> None:
    runs = verify.windows((rows, ONE), unit).runs
    if rows % unit:
        assert runs == ((0, rows),)
        return
    assert all(start % unit == 0 and count % unit == 0 for start, count in runs)
    assert sum(runs[-1]) == rows
    if rows >= 128 * 12 * unit:
        (first, count), (middle, _), _ = runs
        assert first == 0 and {one for _, one in runs} == {count} and 3 * count <= rows / 4
        assert abs(middle - rows / 2) < unit


@pytest.mark.parametrize("shape", [(), (7,), (256, 256)])
def test_small_tensors_are_decoded_whole(shape: tuple[int, ...]) -> None:
    rows = shape[0] if shape else 1
    assert math.prod(shape) <= 1 << 16
    assert verify.windows(shape, 1).runs == ((0, rows),)


@pytest.mark.parametrize("strategy, packed", [("group", True), ("channel", True), ("tensor", False)])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("bits", [4, 7, 8])
def test_narrow_integers_beside_dynamic_activations_are_packed(
    strategy: str, packed: bool, dynamic: bool, bits: int
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    from quark.torch.export.compressed_tensors import format_of

    size = {"group_size": 32} if strategy == "group" else {}
    weights = QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy=strategy, **size)
    inputs = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    given = inputs if dynamic else QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="tensor")
    found = format_of(QuantizationScheme(targets=["Linear"], weights=weights, input_activations=given))
    assert (found.value == "pack-quantized") is (packed and dynamic and bits < 8)


@pytest.mark.parametrize(
    "program, scheme, said",
    [
        (formats.EXPORT, "fp8", "the GGUF format has no fp8 layer"),
        ("vllm", formats.ANY, "vLLM does not read the GGUF format"),
        ("vllm", "fp8", "vLLM has no fp8 layer in the GGUF format"),
    ],
)
def test_what_a_row_that_does_not_work_says(program: str, scheme: str, said: str) -> None:
    row = formats.Row(scheme, "gguf", program, False, "its source")
    assert formats.sentence(row, "fp8", "vllm").startswith(f"{said} (its source); ")


@pytest.mark.parametrize(
    "node, expected",
    [
        ({"type": "Digits", "individual_digits": True}, (("Digits", True),)),
        ({"type": "Digits", "individual_digits": False}, (("Digits", False),)),
        ({"type": "Digits"}, (("Digits", False),)),
        ({"type": "ByteLevel"}, (("ByteLevel", True),)),
        ({"type": "ByteLevel", "use_regex": False}, (("ByteLevel", False),)),
        ({"type": "ByteLevel", "use_regex": True}, (("ByteLevel", True),)),
        ({"pretokenizers": [{"type": "Digits"}, {"type": "A"}]}, (("Digits", False), ("A", True))),
        (None, ()),
    ],
)
def test_steps_of_a_pre_tokenizer(node: Any, expected: tuple[tuple[str, bool], ...]) -> None:
    assert gguf_vocabulary.steps(node) == expected


@pytest.mark.parametrize("vocabulary, size, fits", [({}, 1, True), ({"a": 0}, 1, True), ({"a": 1}, 1, False)])
def test_tokens_that_an_embedding_has_rows_for(
    vocabulary: dict[str, int], size: int, fits: bool, tmp_path: Path
) -> None:
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    content = {"model": model, "pre_tokenizer": {"type": "ByteLevel"}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    if fits:
        assert gguf_vocabulary.json_tokens(tmp_path / "tokenizer.json", size)[1] == list(vocabulary)
    else:
        with pytest.raises(ModelError, match="the token 1"):
            gguf_vocabulary.json_tokens(tmp_path / "tokenizer.json", size)


@pytest.mark.parametrize("sizes, limit, expected", [
    ([4, 4, 4], 8, [2, 1]), ([4, 4, 4], 7, [1, 1, 1]), ([9, 1], 4, [1, 1]), ([1, 9, 1], 4, [1, 1, 1]), ([3, 3], 6, [2]),
])  # fmt: skip
def test_items_fill_files_up_to_the_limit(sizes: list[int], limit: int, expected: list[int]) -> None:
    items: list[Any] = [SimpleNamespace(size=size) for size in sizes]
    assert [len(shard) for shard in shards.split(items, limit)] == expected


@pytest.mark.parametrize("spec, size", [(Int4PerGroupSpec(ch_axis=-1, group_size=32), 32), (Int4PerChannelSpec(0), -1)])
def test_group_size_of_gptq(spec: Any, size: int) -> None:
    """Readers take -1 for one group as long as a row; inputs are in their order, and the head is float."""
    config = QConfig(global_quant_config=QLayerConfig(weight=spec.to_quantization_spec()))
    found = gptq.gptq_config(config, "gptq_v2", ("a.b", "lm_head"))
    wanted = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "pack_dtype": "int32",
        "dynamic": {r"-:^a\.b$": {}},
    }
    assert found == {**wanted, "bits": 4, "group_size": size, "sym": True, "desc_act": False, "lm_head": False}


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", ["tensor", "channel"])
def test_scales_of_fp8_reach_every_axis(dims: int, kind: str) -> None:
    weight = torch.arange(1.0, 1 + 2**dims).reshape((2,) * dims)
    scale = torch.tensor([3.0]) if kind == "tensor" else torch.tensor([3.0, 5.0])
    found = decoded.fp8_decoder(None)({"weight": weight, "scale": scale})
    rows = [3.0, 3.0 if kind == "tensor" else 5.0]
    assert found.shape == weight.shape
    for row, factor in enumerate(rows):
        assert torch.equal(found[row], weight[row] * factor)


@pytest.mark.parametrize("size, said", [
    ([64, 128], None), ((1, 1), None), ([0, 128], "two positive"), ([128, -1], "two positive"), ([128], "two positive"),
    ([128, 128, 1], "two positive"), (128, "two positive"), ([128, 1.0], "two positive"), ([True, 1], "two positive"),
    (None, None), ([], None),
])  # fmt: skip
@pytest.mark.parametrize("scheme", [None, "dynamic", "static"])
def test_sizes_of_blocks_of_fp8(size: Any, said: str | None, scheme: str | None) -> None:
    told = said or ("activation_scheme is 'dynamic'" if size and scheme == "static" else None)
    with pytest.raises(ConfigError, match=told) if told else nullcontext():
        custom_modes.check_fp8_blocks({"weight_block_size": size, "activation_scheme": scheme})


@pytest.mark.parametrize("window, layers, row, expected", [
    (None, None, False, 4096), (512, None, False, 512), (512, None, True, 4096), (8192, None, False, 4096),
    (512, ["full_attention"], False, 4096), (512, ["full_attention", "sliding_attention"], False, 512),
    (512, False, False, 4096), (512, True, False, 512),
])  # fmt: skip
def test_the_longest_text_that_llama_cpp_can_take(window: int | None, layers: Any, row: bool, expected: int) -> None:
    config = SimpleNamespace(max_position_embeddings=4096, sliding_window=window)
    if isinstance(layers, list):
        config.layer_types = layers
    elif layers is not None:
        config.use_sliding_window = layers
    known: Any = SimpleNamespace(window=row, behind_padding=False)
    assert gguf_architectures.context_of(config, known) == expected


@pytest.mark.parametrize("program", ["vllm", "sglang", None])
@pytest.mark.parametrize("cached", [True, False])
def test_scales_of_caches_have_names_of_their_own_for_vllm(program: str | None, cached: bool) -> None:
    layer = QLayerConfig()
    config: Any = SimpleNamespace(kv_cache_quant_config={"*k_proj": layer} if cached else {})
    items = [shards.item_of("model.layers.0.self_attn.k_proj.output_scale", torch.ones(1))]
    (found,) = vllm_reads.cache_scales_for(program, config, items)
    moved = program == "vllm" and cached
    assert list(found.form) == [f"model.layers.0.self_attn.{'k_scale' if moved else 'k_proj.output_scale'}"]


def test_only_matrices_count_for_the_loss_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """And codes that lose more than a part of their norm are no codes of the values."""
    monkeypatch.setattr(GGUFTensor, "beyond", lambda *_: 0)

    def entry(shape: tuple[int, ...], coded: bool = False) -> Any:
        return GGUFTensor("t", "F32", shape, lambda: None, coded)  # type: ignore[arg-type, return-value]

    loss = FileLoss()
    for shape in ((4,), (2, 2), (1, 2, 2)):
        loss.add(entry(shape), np.full((1, 4), 2.0, np.float32), np.full(4, 2.5, np.float32))
    assert (loss.error, loss.total) == (2.0, 50.0)
    wanted = np.ones(4096, np.float32)
    for part, fits in ((0.99 * 2.0**-9, True), (1.01 * 2.0**-9, False)):
        with nullcontext() if fits else pytest.raises(ModelError, match="reads back with 0 of"):
            loss.add(entry((1, 4096), True), wanted * np.float32(1 - part), wanted)


def test_the_type_of_a_file_is_that_of_most_matrices() -> None:
    gguf = pytest.importorskip("gguf")
    seen: list[Any] = []
    writer: Any = SimpleNamespace(add_file_type=seen.append, add_quantization_version=lambda version: None)
    kinds = [("blk.0.a", "F32", (8,))] * 5 + [("blk.0.b", "Q4_0", (8, 8))] * 3 + [("blk.0.c", "Q8_0", (8, 8))] * 2
    kinds += [("token_embd", "Q8_0", (8, 8))] * 4
    entries = [GGUFTensor(name, kind, shape, lambda: None) for name, kind, shape in kinds]  # type: ignore[arg-type, return-value]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_model, "add_numbers", lambda *_: None)
        gguf_model.add_metadata(writer, None, None, entries)  # type: ignore[arg-type]
    assert seen == [gguf.LlamaFileType.MOSTLY_Q4_0]


def test_answers_of_a_file_that_are_no_numbers_where_those_of_the_model_are(caplog: pytest.LogCaptureFixture) -> None:
    inf, nan = float("inf"), float("nan")
    wanted = [torch.tensor([1.0, inf, -inf, nan])]
    for answer, fits in (([1.0, inf, -inf, nan], True), ([1.0, 5.0, nan, 1.0], True), ([nan, inf, -inf, nan], False)):
        with nullcontext() if fits else pytest.raises(ModelError, match="answers nan or inf"):
            onnx_run.compare([torch.tensor(answer)], wanted)
    assert not caplog.records
    onnx_run.compare([torch.tensor([2.0, 5.0, nan, 1.0])], wanted)
    assert "answers 1 of the output apart" in caplog.text


def test_an_item_of_what_is_there() -> None:
    made = {"a": torch.ones(2, 3), "b": torch.zeros(1, dtype=torch.int8)}
    found = state.given_item(made)
    assert found is not None and found.form == {"a": ((2, 3), torch.float32), "b": ((1,), torch.int8)}
    assert found.make() is made and state.given_item({}) is None


def test_an_index_is_in_the_order_of_names(tmp_path: Path) -> None:
    """Where each tensor is, and the bytes of all: the same file whatever order the model has them in."""
    parts = [[shards.item_of(name, torch.ones(size))] for name, size in (("b", 2), ("c", 3), ("a", 4))]
    shards.write_index(tmp_path / "index.json", parts, ["1", "2", "3"])
    found = json.loads((tmp_path / "index.json").read_text())
    assert list(found["weight_map"].items()) == [("a", "3"), ("b", "1"), ("c", "2")]
    assert found["metadata"] == {"total_size": 36}


def test_only_a_model_with_stacked_experts_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert gguf_model.taken_apart(model) is model
    monkeypatch.setattr(gguf_model, "is_fused", lambda module: module is model[1])
    apart: list[Any] = []
    monkeypatch.setattr(gguf_model, "unfuse_experts", apart.append)
    found = gguf_model.taken_apart(model)
    assert found is not model and apart == [found]
    assert all(one is other for one, other in zip(found.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("shape, spec, expected", [
    ((8,), None, 32.0), ((2, 4), None, 16.0), ((1, 2, 4), None, 16.0), ((), None, 4.0),
    ((2, 64), Int4PerGroupSpec(-1, 32), 128 * 4.5 / 8), ((2, 64), Uint4PerGroupSpec(-1, 32), 128 * 5 / 8),
    ((2, 64), Int8PerChannelSpec(0, symmetric=True), 128 * 8.5 / 8),
    ((2, 64), OCP_MXFP4Spec(-1, False), 128 * 4.25 / 8),
])  # fmt: skip
def test_bytes_of_a_tensor_in_gguf(shape: tuple[int, ...], spec: Any, expected: float) -> None:
    """float16 in matrices and float32 elsewhere; blocks of 32 with a float16 scale, a minimum too, or an exponent."""
    stages: Any = () if spec is None else (spec.to_quantization_spec().to_stage(),)
    assert gguf_size.bytes_of(shape, stages) == expected


@pytest.mark.parametrize("inner", [{}, {"quant_algo": "FP8", "exclude_modules": ["a"], "kv_cache_quant_algo": "FP8"}])
@pytest.mark.parametrize("given", [True, False])
def test_fields_of_the_file_of_modelopt(inner: dict[str, Any], given: bool) -> None:
    found = declared.of_modelopt({"quantization": inner} if given else {})
    known = inner if given else {}
    assert found["quant_method"] == "modelopt" and found.get("quant_algo") == known.get("quant_algo")
    assert found["ignore"] == known.get("exclude_modules", [])
    assert found["kv_cache_scheme"] == known.get("kv_cache_quant_algo")


EXPERTS = {  # facts of a module, whether it holds experts at all, and whether gate and up take turns
    "gpt_oss": ((True, True, False), True, True),
    "no gate": ((False, True, False), True, False),
    "no bias": ((True, False, False), True, False),
    "side by side": ((True, True, True), True, False),
    "no experts": ((True, True, False), False, None),
}


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("quantized", ["experts.0", "other", None])
def test_what_stacks_of_blocks_take(
    name: str, apart: bool, quantized: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, holds, turns = EXPERTS[name]
    model = torch.nn.Module()
    model.experts = torch.nn.Linear(2, 2)
    facts = dict(zip(("has_gate", "has_bias", "is_concatenated"), given, strict=True))
    kind = torch.nn.Linear if apart and holds else torch.nn.Bilinear
    monkeypatch.setattr(stacked_blocks, "UnfusedExperts", kind)
    monkeypatch.setattr(stacked_blocks, "is_fused", lambda module: not apart and holds and module is model.experts)
    monkeypatch.setattr(stacked_blocks, "fact", lambda module, name: facts[name])
    assert stacked_blocks.takes_turns(model.experts) is bool(turns) and not stacked_blocks.takes_turns(model)
    candidates = [SimpleNamespace(name=path) for path in ("experts.0", "other")]
    monkeypatch.setattr(stacked_blocks, "find_candidates", lambda model: candidates)
    monkeypatch.setattr(stacked_blocks, "stacked_config", lambda *_: None)
    monkeypatch.setattr(
        stacked_blocks, "choose_all", lambda layer, config: (1,) if layer.name == quantized else (None,)
    )
    inside = holds and quantized == "experts.0"
    told = (
        "do not take turns" if turns is False else f"'{quantized}' is quantized" if quantized and not inside else None
    )
    with pytest.raises(ConfigError, match=told) if told else nullcontext():
        stacked_blocks.check_stacks(model, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("size, whole", [(1 << 16, True), ((1 << 16) + 32, False), ((1 << 16) + 1, True)])
def test_tensors_of_gguf_that_are_decoded_as_a_whole(size: int, whole: bool) -> None:
    numbers = np.zeros(size, np.float32)
    data, wanted = gguf_tensors.compared(numbers, numbers, 32)
    assert (data is numbers and wanted is numbers) is whole


def test_what_a_file_holds_of_a_configuration_is_in_order(tmp_path: Path) -> None:
    """And without what the class has anyway."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model_files.write_config(LlamaForCausalLM(LlamaConfig(vocab_size=8, **small)), tmp_path, {"z": 1, "a": 2})
    found = json.loads((tmp_path / "config.json").read_text())
    assert list(found) == sorted(found) and list(found["quantization_config"]) == ["a", "z"]
    assert found["hidden_size"] == 8 and "return_dict" not in found


FILES = {  # what is wrong with a file of one tensor of four bytes, and whether it is whole
    "nothing": (lambda raw: raw, True),
    "a byte more": (lambda raw: raw + b"\0", False),
    "a byte less": (lambda raw: raw[:-1], False),
    "a header that is longer than the file": (lambda raw: (len(raw) - 7).to_bytes(8, "little") + raw[8:], False),
    "a header as long as the file": (lambda raw: (len(raw) - 8).to_bytes(8, "little") + raw[8:], False),
    "no length": (lambda raw: raw[:5], False),
    "no JSON": (lambda raw: raw[:8] + b"?" + raw[9:], False),
    "no offsets": (lambda raw: raw.replace(b"data_offsets", b"data_offsetz"), False),
    "offsets that are none": (lambda raw: raw.replace(b"[0,4]", b"[0]  "), False),
    "a list": (lambda raw: (2).to_bytes(8, "little") + b"[]", False),
    "no tensors": (lambda raw: (2).to_bytes(8, "little") + b"{}", True),
    "no tensors, and a byte": (lambda raw: (2).to_bytes(8, "little") + b"{}\0", False),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_whole_where_it_ends_as_its_header_says(name: str, tmp_path: Path) -> None:
    from safetensors.torch import save

    change, whole = FILES[name]
    path = tmp_path / "m.safetensors"
    assert not shards.is_whole(path)
    path.write_bytes(change(save({"a": torch.ones(1)}, {"b": "c"})))
    assert shards.is_whole(path) is whole


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "span", [(-3.0, -0.1), (-5.0, -0.1), (-7.0, -3.0), (-9.0, -8.1), (0.1, 3.0), (0.1, 9.0), (0.0, 0.0), (-3.9, 3.9)]
)
def test_scales_of_float16_that_leave_half_of_the_codes(
    span: tuple[float, float], symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 codes fewer than 8 are used, from 0 on or to both sides; a larger scale wastes none."""
    least = 2.0**-14 / 2
    weight = torch.linspace(*span, 64)[None] * least
    layout: Any = SimpleNamespace(granularity=Group(-1, 32), shape=(1, 64), element=SimpleNamespace(bits=4))
    layout.stage = SimpleNamespace(spec=SimpleNamespace(symmetric=symmetric))
    monkeypatch.setattr(gguf_tensors, "source_of", lambda layer: weight)
    halves = [torch.linspace(*span, 64)[k : k + 32] for k in (0, 32)]
    spans = [(min(float(half.min()), 0.0), max(float(half.max()), 0.0)) for half in halves]
    used = [2 * max(-a, b) if symmetric else b - a for a, b in spans]
    expected = any(0 < one < 8 for one in used)
    found = gguf_tensors.wastes_codes(None, torch.full((1, 2), least), layout)  # type: ignore[arg-type]
    assert found is expected
    large = torch.full((1, 2), gguf_tensors.SMALLEST)
    assert not gguf_tensors.wastes_codes(None, large, layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("sources", [["gate", "up"], ["down"]])
def test_biases_of_experts_take_turns(sources: list[str]) -> None:
    layers = [[f"e.{number}.{source}" for source in sources] for number in range(2)]
    numbers = iter(range(1, 9))
    values = {name: torch.tensor([1.0, 2.0]) * 10 ** next(numbers) for group in layers for name in group}
    items = {f"{name}.bias": shards.item_of(f"{name}.bias", value) for name, value in values.items()}
    found = stacked_blocks.bias_stack("experts.down", layers, items)
    made = found.make()["experts.down_bias"]
    rows = 2 * len(sources)
    assert found.form == {"experts.down_bias": ((2, rows), torch.float32)} and made.shape == (2, rows)
    for number, group in enumerate(layers):
        assert made[number].tolist() == [float(values[name][row]) for row in range(2) for name in group]


@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("inputs", [True, False])
@pytest.mark.parametrize("scheme", ["experts.0.up_proj", "other", "expertsx"])
def test_experts_that_transformers_does_not_read(
    replaced: bool, listed: bool, inputs: bool, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Module()
    model.experts, model.other = torch.nn.Bilinear(1, 1, 1), torch.nn.Linear(1, 1)
    monkeypatch.setattr(transformers_reads, "UnfusedExperts", torch.nn.Bilinear)
    monkeypatch.setattr(transformers_reads, "is_replaced", lambda module: replaced)
    monkeypatch.setattr(transformers_reads, "is_listed", lambda path, module, names: listed)
    monkeypatch.setattr(transformers_reads, "is_fused", lambda module: False)
    schemes = {scheme: SimpleNamespace(input_activations=1 if inputs else None, weights="int4")}
    found = transformers_reads.experts(model, schemes, None)  # type: ignore[arg-type]
    if not scheme.startswith("experts.") or replaced:
        assert found is None
    elif not listed:
        assert found == "it has no place for the experts of 'experts', and makes them up at random"
    else:
        assert found == ("it computes the experts of 'experts' with float inputs" if inputs else None)


@pytest.mark.parametrize("cached", [True, False, None])
def test_the_folder_that_a_model_came_from(
    cached: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    def lookup(name: str, file: str, revision: str | None) -> Any:
        assert (name, file, revision) == ("a/b", "config.json", "1234")
        if cached is None:
            raise HFValidationError
        return str(tmp_path / "config.json") if cached else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lookup)
    monkeypatch.setattr(model_files, "is_transformers", lambda model: hasattr(model, "config"))
    model: Any = torch.nn.Module()
    assert model_files.source_of(model) is None
    model.config = SimpleNamespace(_name_or_path="", _commit_hash="1234")
    assert model_files.source_of(model) is None
    model.config._name_or_path = "a/b"
    assert model_files.source_of(model) == (tmp_path if cached else None)
    model.config._name_or_path = str(tmp_path)
    assert model_files.source_of(model) == tmp_path
