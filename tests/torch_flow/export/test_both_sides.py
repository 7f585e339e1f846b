"""What the exports decide, over all combinations of what they look at, against the sentence that says it."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.onnx_flow import models
from torch import nn

from quark.config import file_formats as formats
from quark.errors import ConfigError, ModelError
from quark.numerics.elements import ELEMENTS
from quark.numerics.granularity import Block2D, Channel, Group, Tensor
from quark.torch import ModelQuantizer
from quark.torch.export import (
    card,
    custom_modes,
    decoded,
    described,
    gguf_bounds,
    gguf_tensors,
    gguf_types,
    huggingface,
    loader,
    model_files,
    onnx_nodes,
    onnx_run,
    onnx_verify,
    original,
    places,
    shards,
    stored,
    transformers_reads,
    verify,
)
from quark.torch.fake_quantize import FakeQuantize
from quark.torch.quantization.config.config import (
    FP8E4M3PerGroupSpec,
    FP8E4M3PerTensorSpec,
    Int4PerGroupSpec,
    Int8PerTensorSpec,
    QConfig,
    QLayerConfig,
)

BOTH = (False, True)


def subsets(things: list[Any]) -> list[list[Any]]:
    return [list(part) for size in range(len(things) + 1) for part in itertools.combinations(things, size)]


def test_words_of_programs_say_what_is_cached_unless_it_is_turned_or_fused() -> None:
    own = [SimpleNamespace(name="awq"), SimpleNamespace(r3=False), SimpleNamespace(r3=True)]
    for behind, algorithms, patterns in itertools.product(BOTH, subsets(own), subsets(["*k_proj", "*qkv_proj"])):
        config: Any = SimpleNamespace(
            kv_cache_post_rope=behind, algo_config=algorithms, kv_cache_quant_config=dict.fromkeys(patterns)
        )
        needed = own[2] in algorithms or "*qkv_proj" in patterns
        assert described.tells_caches(config) is not (behind and needed), (behind, algorithms, patterns)


@pytest.mark.parametrize("quantized", subsets(["visual.a", "model.layers.0.q"]))
def test_a_tower_is_excluded_as_a_whole_where_nothing_of_it_is_quantized(
    quantized: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(described, "towers", lambda model: ["model.visual.*", "audio.*", "*head"])
    names: Any = SimpleNamespace(layer=lambda name: f"model.{name}")
    found = list(described.float_towers(nn.Module(), names, quantized))
    towers = ["audio"] if "visual.a" in quantized else ["visual", "audio"]
    assert found == [rf"re:(.*\.)?{tower}\..+" for tower in towers]


@pytest.mark.parametrize("format", [*formats.FORMATS, "none of them"])
def test_keys_are_quantized_behind_rope_where_the_format_or_the_program_does(format: str) -> None:
    assert formats.quantizes_behind_rope(format, "vllm") is True
    row = formats.FORMATS.get(format)
    assert formats.quantizes_behind_rope(format, None) is (row is not None and row.behind_rope)


def test_answers_that_can_be_compared_are_arrays_of_floats() -> None:
    kept = [np.zeros(2, np.float32), np.zeros(2, np.float16), np.zeros((), np.float64)]
    others: list[Any] = [np.zeros(2, np.int64), np.zeros(2, bool), [np.zeros(2)], None, 1.5, np.float32(2)]
    assert [id(one) for one in onnx_run.tensors_in([*others, *kept, *others])] == [id(one) for one in kept]


def test_a_value_that_two_nodes_read_is_computed_once() -> None:
    """Constants of a graph in which everything is read more than once, and something by nothing."""
    text = """g (float[1] x) => (float[2] y, float[1] z) { a = Neg (c) b = Add (a, c) d = Mul (b, a) e = Sub (d, b)
        y = Mul (e, d) z = Abs (x) }"""
    graph = models.model(text, {"c": np.array([3, -2], np.float32)}, 17)
    makers = {name: node for node in graph.graph.node for name in node.output}
    constants = {one.name: one for one in graph.graph.initializer}
    for name, value in {"a": [-3, 2], "b": [0, 0], "d": [0, 0], "e": [0, 0], "y": [0, 0], "c": [3, -2]}.items():
        assert onnx_verify.evaluated(graph, name, makers, constants).tolist() == value


@pytest.mark.parametrize("own", ["weight", "bias"])
@pytest.mark.parametrize("marked", [None, False, True])
def test_a_layer_is_loaded_where_each_of_its_tensors_bears_the_mark(
    own: str, marked: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer: Any = nn.Linear(2, 2)
    layer.quantizers = list
    for name, value in layer.named_parameters():
        value._is_hf_initialized = True
        if name == own and marked is None:
            del value._is_hf_initialized
        elif name == own:
            value._is_hf_initialized = marked
    monkeypatch.setattr(loader, "quantized_layers", lambda model: [("layer", layer)])
    if marked:
        loader.check_loaded(nn.Module())
        return
    with pytest.raises(ModelError, match=f"the files lack '{own}' of the quantized layer 'layer'"):
        loader.check_loaded(nn.Module())


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_rows_share_a_scale_along_the_first_axis_however_it_is_counted(dims: int) -> None:
    for axis in range(-dims, dims):
        first = axis in (0, -dims)
        assert verify.rows_of_a_scale(Channel(axis), dims) == (1 if first else 0)
        assert verify.rows_of_a_scale(Group(axis, 48), dims) == (48 if first else 1)


@pytest.mark.parametrize("was", ["cpu", "meta"])
@pytest.mark.parametrize("device", [None, torch.device("meta"), torch.device("cpu")])
def test_a_tensor_goes_where_it_is_sent_or_else_where_its_place_is(was: str, device: torch.device | None) -> None:
    module = nn.Module()
    module.register_buffer("w", torch.zeros(2, device=was))
    assert places.put(module, "w", torch.ones(2), "it", device).device.type == (device.type if device else "cpu")


@pytest.mark.parametrize("ignored", [["w"], ["v"], []])
def test_what_a_model_ignores_is_left_out_only_where_it_has_no_place(
    ignored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Module()
    model.register_buffer("w", torch.zeros(2))
    monkeypatch.setattr(places, "is_ignored", lambda model, name: name in ignored)
    held: Any = SimpleNamespace(folder="f", tensors=lambda: iter([("v", torch.ones(1)), ("w", torch.ones(2))]))
    if "v" not in ignored:
        with pytest.raises(ModelError, match="no place for the tensor 'v'"):
            places.load(model, held)
        return
    places.load(model, held)
    assert model.w.tolist() == [1, 1]


def test_a_form_on_no_device_gets_memory() -> None:
    form = {"codes": ((2,), torch.int8), "scale": ((3,), torch.float32)}
    parameters = stored.StoredParameters(form, torch.device("meta")).to_empty(device="cpu")
    assert [(value.device.type, value.dtype) for value in parameters.buffers()] == [
        ("cpu", torch.int8),
        ("cpu", torch.float32),
    ]


@pytest.mark.parametrize("holds", [None, "a name", nn.Linear(1, 1)])
@pytest.mark.parametrize("merges", BOTH)
def test_an_adapter_lies_around_a_layer_and_can_be_merged(holds: Any, merges: bool) -> None:
    module: Any = nn.Module()
    if holds is not None:
        module.base_layer = holds
    if merges:
        module.merge = lambda: None
    refused = isinstance(holds, nn.Module) and merges
    with pytest.raises(ModelError, match="is an adapter around a layer") if refused else nullcontext():
        model_files.check_merged(nn.Sequential(nn.Identity(), module))


@pytest.mark.parametrize("known", BOTH)
@pytest.mark.parametrize("given", BOTH)
def test_generation_settings_are_written_for_models_of_transformers_that_have_some(
    known: bool, given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = nn.Module()
    model.generation_config = SimpleNamespace(to_json_string=lambda: "{}") if given else None
    monkeypatch.setattr(model_files, "config_of", lambda model: {})
    monkeypatch.setattr(model_files, "is_transformers", lambda model: known)
    model_files.write_config(model, tmp_path, {"bits": 4})
    assert (tmp_path / model_files.GENERATION).exists() is (known and given)


def test_files_of_a_folder_are_those_that_are_seen(tmp_path: Path) -> None:
    for name in ("b", "a", ".hidden"):
        (tmp_path / name).touch()
    for name in ("folder", ".folder"):
        (tmp_path / name).mkdir()
    assert [path.name for path in model_files.files_of(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize("blocks", [None, (2, 3)])
@pytest.mark.parametrize("shape", [(), (4,), (4, 1), (2, 2)])
@pytest.mark.parametrize("dims", [2, 3])
def test_scales_of_fp8_are_in_blocks_where_a_matrix_has_a_matrix_of_them(
    blocks: tuple[int, int] | None, shape: tuple[int, ...], dims: int
) -> None:
    in_blocks = blocks is not None and len(shape) == dims == 2
    if (shape == (2, 2) and not in_blocks) or (shape == (4, 1) and in_blocks):
        return  # no file has these
    weight, scale = torch.ones((4, 6, 2)[:dims]), torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    found = decoded.fp8_decoder(blocks)({"weight": weight, "scale": scale})
    expected = np.kron(scale.numpy(), np.ones((2, 3))) if in_blocks else scale.reshape(-1, *[1] * (dims - 1)) * weight
    assert np.array_equal(found.numpy(), np.asarray(expected))


def test_ties_are_kept_between_weights_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    layers: Any = [(name, SimpleNamespace(weight_quantizer=one)) for name, one in (("a", 1), ("b", 1), ("c", None))]
    monkeypatch.setattr(loader, "quantized_layers", lambda model: layers)
    ties = {"a.weight": "b.weight", "b.weight": "c.weight", "c.weight": "d.weight", "d.weight": "a.weight"}
    model: Any = nn.Module()
    loader.untie(model)
    model.all_tied_weights_keys = None
    loader.untie(model)
    model.all_tied_weights_keys = ties
    loader.untie(model)
    assert ties == {"a.weight": "b.weight", "c.weight": "d.weight"}


def test_only_weights_that_are_quantized_have_codes() -> None:
    weights, inputs = FP8E4M3PerTensorSpec().to_quantization_spec(), Int8PerTensorSpec().to_quantization_spec()
    for config, expected in ((QLayerConfig(weight=weights), ["0.weight"]), (QLayerConfig(input_tensors=inputs), [])):
        model = ModelQuantizer(QConfig(config)).quantize_model(nn.Sequential(nn.Linear(4, 4)), [torch.ones(1, 4)])
        assert list(huggingface.coded_layouts(model, "order")) == expected


@pytest.mark.parametrize("dynamic", BOTH)
@pytest.mark.parametrize("rule", ["float32", "power_of_two"])
def test_blocks_of_fp8_have_static_weights_and_scales_in_float32(
    dynamic: bool, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = FP8E4M3PerGroupSpec(-1, 128, is_dynamic=True).to_quantization_spec()
    config: Any = QConfig(QLayerConfig(input_tensors=inputs))
    stage = SimpleNamespace(spec=SimpleNamespace(scale_rule=rule))
    weight: Any = SimpleNamespace(block_size=(128, 128), is_dynamic=dynamic, to_stage=lambda: stage)
    refused = dynamic or rule != "float32"
    with pytest.raises(ConfigError, match="weights are static") if refused else nullcontext():
        assert custom_modes.fp8_block_config(config, weight)["weight_block_size"] == [128, 128]


@pytest.mark.parametrize("granularity", [Tensor(), Channel(0), Channel(1), Group(0, 2), Group(1, 2), Block2D(2, 2)])
@pytest.mark.parametrize("scale", [None, torch.ones(()), torch.ones(2, 1)])
@pytest.mark.parametrize("block", BOTH)
@pytest.mark.parametrize("ranged", BOTH)
def test_scales_go_along_rows_where_each_belongs_to_some(
    granularity: Any, scale: torch.Tensor | None, block: bool, ranged: bool
) -> None:
    """A scale that is not known yet does so in blocks that find it themselves."""
    stage: Any = SimpleNamespace(spec=SimpleNamespace(granularity=granularity), is_block=block, needs_range=ranged)
    part = FakeQuantize(stage)
    part.scale = scale
    along = granularity not in (Tensor(), Channel(1))
    known = block and not ranged if scale is None else scale.dim() > 0
    assert bool(verify.goes_along_rows(part)) is (along and known)


# ---- GGUF ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [5, 16, 17, 18, 400])
@pytest.mark.parametrize("rest", [0, 1])
def test_of_a_large_tensor_both_ends_and_one_block_of_every_part_are_decoded(
    count: int, rest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_tensors, "PART", 4)
    monkeypatch.setattr(gguf_tensors, "WHOLE", 32)
    wanted = np.arange(2 * count + rest)
    data = np.repeat(np.arange(count), 3)
    found, numbers = gguf_tensors.compared(data, wanted, 2)
    if wanted.size <= 32 or rest:
        assert found is data and numbers is wanted
        return
    blocks = numbers[:, 0] // 2
    assert found.tolist() == [np.repeat(blocks, 3).tolist()] and (numbers[:, 1] == numbers[:, 0] + 1).all()
    assert (blocks[0], blocks[-1]) == (0, count - 1)
    assert (blocks[1:-1] // 4).tolist() == list(range(count // 4))
    if count == 400:
        assert len(set(blocks[1:-1] % 4)) == 4, "always the same place of a part"


@pytest.mark.parametrize("kind", gguf_bounds.GRIDS)
def test_slack_widens_what_a_block_may_be_off(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = gguf_bounds.GRIDS[kind]
    blocks = np.random.default_rng(2).standard_normal((2 * row.size // row.sub, row.sub)).astype(np.float32)
    tight = gguf_bounds.allowed(row, blocks)
    monkeypatch.setattr(gguf_bounds, "SLACK", 1 + 2 * gguf_bounds.SLACK)
    np.testing.assert_allclose(gguf_bounds.allowed(row, blocks), 2 * tight, rtol=1e-6)


def test_a_matrix_of_zeros_is_near_itself() -> None:
    assert gguf_tensors.near_float16(np.zeros((2, 32), np.float32))


@pytest.mark.parametrize("count", [1, 3])
def test_experts_of_a_layer_are_one_tensor(count: int) -> None:
    def entry(number: int) -> gguf_tensors.GGUFTensor:
        values = np.full((4, 2), number, np.float32)
        return gguf_tensors.GGUFTensor("e", "F32", (4, 2), lambda: (values, lambda: values + 0.5))

    found = gguf_tensors.together("e", [entry(number) for number in range(count)])
    assert (found.kind, found.shape) == ("F32", (count, 4, 2))
    data, values = found.make()
    assert data[:, 0, 0].tolist() == list(range(count)) and (values() == data + 0.5).all()


# ---- what is read back, and by which rule ----------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "roles"), [
    ("awq", {"qweight", "qzeros", "scales"}), ("gptq", {"qweight", "qzeros", "scales", "g_idx"}),
    ("fp8", {"weight", "weight_scale"}), ("modelopt", {"weight", "weight_scale"}), ("other", None),
])  # fmt: skip
def test_every_layer_of_a_mode_is_read_back(mode: str, roles: set[str] | None) -> None:
    layer = QLayerConfig(weight=FP8E4M3PerTensorSpec().to_quantization_spec())
    model = ModelQuantizer(QConfig(layer)).quantize_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    names: Any = SimpleNamespace(layer=lambda name: f"m.{name}")
    found = custom_modes.foreign(model, names, {"quant_method": mode, "bits": 4, "quant_algo": "FP8"})
    assert set(found) == (set() if roles is None else {"0", "1"})
    for name, one in found.items():
        assert one.parts == {role: f"m.{name}.{role}" for role in roles or ()} and one.exact is (mode != "modelopt")


@pytest.mark.parametrize(("shape", "fits"), [((16, 12), True), ((12, 16), False)])
def test_codes_of_awq_fill_words_along_the_outputs(shape: tuple[int, int], fits: bool) -> None:
    layouts: Any = {"fc.weight": SimpleNamespace(shape=shape)}
    config = QConfig(QLayerConfig(weight=Int4PerGroupSpec(-1, 4).to_quantization_spec()))
    with nullcontext() if fits else pytest.raises(ConfigError, match="has 12 outputs"):
        custom_modes.custom_items(nn.Identity(), [], layouts, "awq", config)


@pytest.mark.parametrize("coded", BOTH)
def test_codes_of_q4_1_may_lose_more(coded: bool) -> None:
    entry = gguf_tensors.GGUFTensor("t", "Q4_1", (1, 32), lambda: None, coded)  # type: ignore[arg-type, return-value]
    ones = np.ones((1, 32), np.float32)
    assert (entry.beyond(ones, 30 * ones) == 0) is coded
    other = gguf_tensors.GGUFTensor("t", "Q8_0", (1, 32), lambda: None, True)  # type: ignore[arg-type, return-value]
    assert other.beyond(ones, 30 * ones) == 32


def test_of_a_large_tensor_whole_blocks_are_compared() -> None:
    """Also where the bytes of a block would divide its numbers, too: 34 of Q8_0."""
    gguf = pytest.importorskip("gguf")
    values = np.random.default_rng(0).standard_normal((32, 2176)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    loss = gguf_tensors.FileLoss()
    loss.add(gguf_tensors.GGUFTensor("t", "Q8_0", values.shape, lambda: None), data, values)  # type: ignore[arg-type, return-value]
    assert 0 < loss.relative < 0.01


def test_quotes_and_bars_in_the_name_of_a_folder_are_words() -> None:
    assert card.in_a_line('a "b"|c\n<d>') == 'a "b"\\|c &lt;d&gt;'


def test_files_in_folders_that_are_not_there_yet_go_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c.txt").write_text("it")
    monkeypatch.setattr(model_files, "beside", lambda source: [source / "a" / "b" / "c.txt"])
    monkeypatch.setattr(model_files, "is_copied", lambda path: False)
    model_files.copy_files(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(model_files, "is_copied", lambda path: True)
    model_files.copy_files(tmp_path, tmp_path / "out")
    goal = tmp_path / "out" / "a" / "b" / "c.txt"
    assert goal.read_text() == "it"
    goal.write_text("own")
    model_files.copy_files(tmp_path, tmp_path / "out")
    assert goal.read_text() == "own"


def test_numbers_in_names_are_sorted_as_numbers() -> None:
    names = ["b.10.w", "b.2.w", "b.x.w", "a.2.w", "b.2"]
    assert sorted(names, key=original.natural) == ["a.2.w", "b.2", "b.2.w", "b.10.w", "b.x.w"]


@pytest.mark.parametrize(("kinds", "fits"), [({"Q4_0"}, True), ({"Q4_0", "Q8_0"}, False), (set(), True)])
def test_experts_of_a_layer_have_one_type(kinds: set[str], fits: bool) -> None:
    with nullcontext() if fits else pytest.raises(ConfigError, match="have the types Q4_0, Q8_0"):
        gguf_types.check_alike("experts", kinds)


@pytest.mark.parametrize(("kind", "length", "fits"), [
    ("F16", 33, True), ("F32", 1, True), ("Q8_0", 33, False), ("Q8_0", 64, True), ("Q4_K", 64, False),
    ("Q4_K", 512, True),
])  # fmt: skip
def test_blocks_divide_the_rows_of_what_has_blocks(kind: str, length: int, fits: bool) -> None:
    with nullcontext() if fits else pytest.raises(ConfigError, match=f"rows of {length} numbers"):
        gguf_types.check_rows("w", kind, length)


def test_windows_of_rows_have_a_scale_each_at_least() -> None:
    """Four rows of 64 under eight scales: the one that they share."""
    windows = decoded.Windows(64, ((0, 4), (32, 4), (60, 4)))
    assert windows.cut(torch.arange(8)).tolist() == [0, 4, 7]
    assert windows.cut(torch.arange(64)).tolist() == [*range(4), *range(32, 36), *range(60, 64)]


def test_a_model_that_saw_all_its_axes_is_not_run_for_them() -> None:
    assert transformers_reads.show_axes_of(nn.Linear(2, 2), nn.Linear(2, 2)) is False


def test_files_beside_a_model_come_in_order(tmp_path: Path) -> None:
    names = [f"{letter}.json" for letter in "hcbgadfe"]
    for name in names:
        (tmp_path / name).write_text("{}")
    assert [path.name for path in model_files.beside(tmp_path)] == sorted(names)


@pytest.mark.parametrize(("name", "zeros", "expected", "kind"), [
    ("int8", [-3, 5], [125, 133], "uint8"), ("int8", [0, 0], [0, 0], "int8"), ("uint8", [3, 5], [3, 5], "uint8"),
])  # fmt: skip
def test_zero_points_with_a_sign_move_by_128(name: str, zeros: list[int], expected: list[int], kind: str) -> None:
    moved, row = onnx_nodes.movable(torch.tensor(zeros, dtype=torch.int8), ELEMENTS[name])
    assert moved.tolist() == expected and row.name == kind


@pytest.mark.parametrize("claimed", [0, 2, 3, 2**32, 2**63])
def test_a_file_whose_header_is_longer_than_it_is_cut_off(claimed: int, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(claimed.to_bytes(8, "little") + b"{}")
    assert shards.is_whole(tmp_path / "m.safetensors") is (claimed == 2)


@pytest.mark.parametrize(("symmetric", "low", "high", "wasted"), [
    (True, 0, 1.9, True), (True, -1.9, 0, True), (True, 0, 2.1, False), (True, -2.1, 0, False), (True, 0, 0, False),
    (False, 0, 3.9, True), (False, 1, 3.9, True), (False, 0, 4.1, False), (False, -1, 3.1, False),
    (False, -3.9, -1, True), (False, -4.1, -1, False),
])  # fmt: skip
@pytest.mark.parametrize(("columns", "size"), [(64, 32), (48, 32), (64, None)])
def test_a_scale_at_the_smallest_of_float16_wastes_codes(
    symmetric: bool, low: float, high: float, wasted: bool, columns: int, size: int | None, monkeypatch: Any
) -> None:
    """Four bits and a scale of half the smallest normal one: fewer than eight of the codes are used."""
    smallest = gguf_tensors.SMALLEST
    weights = torch.zeros(2, columns)
    weights[1] = torch.linspace(low * smallest, high * smallest, 4).repeat(columns // 4)
    layout: Any = SimpleNamespace(
        shape=(2, columns), granularity=Channel(0) if size is None else Group(-1, size),
        stage=SimpleNamespace(spec=SimpleNamespace(symmetric=symmetric)), element=SimpleNamespace(bits=4),
    )  # fmt: skip
    monkeypatch.setattr(gguf_tensors, "source_of", lambda layer: weights)
    scale = torch.full(layout.granularity.parameter_shape((2, columns)), smallest / 2)
    assert gguf_tensors.wastes_codes(nn.Identity(), scale, layout) is wasted  # type: ignore[arg-type]
    assert not gguf_tensors.wastes_codes(nn.Identity(), scale * 2, layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [32, 48, 64])
def test_one_group_that_wastes_its_codes_is_enough(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where groups divide the rows; where they do not, a row is looked at as a whole."""
    smallest = gguf_tensors.SMALLEST
    weights = torch.full((2, 64), smallest)
    weights[:, 0] = 9 * smallest
    layout: Any = SimpleNamespace(
        shape=(2, 64), granularity=Group(-1, size),
        stage=SimpleNamespace(spec=SimpleNamespace(symmetric=True)), element=SimpleNamespace(bits=4),
    )  # fmt: skip
    monkeypatch.setattr(gguf_tensors, "source_of", lambda layer: weights)
    scale = torch.full(layout.granularity.parameter_shape((2, 64)), smallest / 2)
    assert gguf_tensors.wastes_codes(nn.Identity(), scale, layout) is (size == 32)  # type: ignore[arg-type]
