"""Exports read themselves back: whatever the writer does wrong is an error, and no folder appears."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.torch_flow.models import TwoLayers

from quark.errors import ModelError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.export import state
from quark.torch.export.api import export_safetensors
from quark.torch.quantization.config.config import Int4PerGroupSpec, Int8PerChannelSpec, QConfig, QLayerConfig

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 128, "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
Stored = Mapping[str, torch.Tensor]


def quantized(scheme: str) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=512)).eval()
    config = LLMTemplate.for_model(model).get_config(scheme)
    return ModelQuantizer(config).quantize_model(model, [torch.randint(0, 128, (2, 16))])


def a_nibble(stored: Stored) -> Stored:
    """The first two codes of every word change places."""
    word = stored[""]
    return {**stored, "": (word & ~0xFF) | (word & 0xF) << 4 | (word >> 4) & 0xF}


def a_scale(stored: Stored) -> Stored:
    """Every scale is doubled."""
    return {**stored, "scale": stored["scale"] * 2}


def turned_around(stored: Stored) -> Stored:
    """Codes the other way round."""
    return {**stored, "": stored[""].flip(0).contiguous()}


def transposed(stored: Stored) -> Stored:
    """Square codes are transposed."""
    codes = stored[""]
    return {**stored, "": codes.T.contiguous() if codes.shape[0] == codes.shape[1] else codes}


@pytest.mark.parametrize("shape", [(64, 48), (512, 320)], ids=["whole", "in windows"])
@pytest.mark.parametrize(
    "spec",
    [
        *(Int8PerChannelSpec(ch_axis=axis, is_dynamic=False) for axis in (0, 1, -1, -2)),
        *(Int4PerGroupSpec(ch_axis=axis, group_size=size) for axis, size in ((-1, 16), (0, 32), (1, 16), (-2, 64))),
    ],
    ids=lambda spec: f"{type(spec).__name__} {spec.ch_axis}",
)
def test_whatever_shares_a_scale_reads_back(spec: Any, shape: tuple[int, int], tmp_path: Path) -> None:
    """Scales of columns are not those of rows, in matrices that are compared as a whole and in part."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(*shape[::-1], bias=False) for _ in range(2)))
    weight = spec.to_quantization_spec()
    export_safetensors(ModelQuantizer(QConfig(QLayerConfig(weight=weight))).quantize_model(model), tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").is_file()


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 15, 17])
def test_rows_that_fill_no_words_read_back(rows: int, tmp_path: Path) -> None:
    """Codes of several outputs share a word, and the next layer begins with a word of its own."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({str(number): torch.nn.Linear(64, rows) for number in range(8)})
    spec = Int4PerGroupSpec(ch_axis=-1, group_size=32).to_quantization_spec()
    export_safetensors(ModelQuantizer(QConfig(QLayerConfig(weight=spec))).quantize_model(model), tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").is_file()


@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8", "mxfp4", "int8_wo_per_channel", "nvfp4", "int4_fp8", "mx6"])
def test_what_is_right_is_written(scheme: str, tmp_path: Path) -> None:
    export_safetensors(quantized(scheme), tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("scheme", "broken"),
    [
        ("int4_wo_32", a_nibble), ("int4_wo_32", a_scale), ("int4_wo_32", turned_around),
        ("int8_wo_per_channel", transposed), ("int8_wo_per_channel", a_scale), ("mxfp4", turned_around),
    ],
)  # fmt: skip
def test_a_broken_writer_writes_nothing(
    scheme: str, broken: Callable[[Stored], Stored], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = quantized(scheme), state.store
    monkeypatch.setattr(state, "store", lambda *arguments: broken(store(*arguments)))
    with pytest.raises(ModelError, match="does not read back"):
        export_safetensors(model, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    export_safetensors(model, tmp_path / "m", verify=False)
    assert (tmp_path / "m").exists()


def shuffled(stored: Stored) -> Stored:
    """The first tensor of codes with its rows the other way round."""
    name = next(name for name in stored if name.endswith(("qweight", "weight_packed", "weight")))
    return {**stored, name: stored[name].flip(0).contiguous()}


def doubled(stored: Stored) -> Stored:
    """Scales twice as large."""
    name = next(name for name in stored if name.endswith(("scales", "weight_scale", "weight_scale_inv")))
    return {**stored, name: (stored[name].float() * 2).to(stored[name].dtype)}


FORMATS = {
    "awq": ("int4_wo_32",), "gptq": ("int4_wo_32", "int8_wo_per_channel"), "gptq_v2": ("uint4_wo_32",),
    "modelopt": ("fp8", "nvfp4", "mxfp8"), "fp8": ("fp8_block",),
    "compressed-tensors": ("int4_wo_32", "fp8_block", "nvfp4", "mxfp4_weight_only", "ptpc_int8"),
}  # fmt: skip


@pytest.mark.parametrize("broken", [None, shuffled, doubled])
@pytest.mark.parametrize(("format", "scheme"), [(name, one) for name, own in FORMATS.items() for one in own])
def test_formats_of_other_programs_are_decoded_by_their_own_rules(
    format: str, scheme: str, broken: Callable[[Stored], Stored] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in the file is what the program decodes: large tensors in windows of rows."""
    from quark.torch.export import compressed_tensors, huggingface, shards, verify

    def write_broken(folder: Path, items: list[shards.Item], *rest: Any) -> list[str]:
        coded = next(item for item in items if len(item.form) > 1 and any("scale" in name for name in item.form))
        bad = shards.Item(coded.form, lambda: broken(coded.make()))  # type: ignore[misc]
        return shards.write_shards(folder, [bad if item is coded else item for item in items], *rest)

    own = compressed_tensors if format == "compressed-tensors" else huggingface
    if broken is not None:
        monkeypatch.setattr(own, "write_shards", write_broken)
    monkeypatch.setattr(verify, "WHOLE", 1 << 12)
    model = quantized(scheme)
    write: dict[str, Any] = {
        "compressed-tensors": partial(compressed_tensors.export_compressed_tensors, program="vllm")
    }
    export = write.get(format, lambda model, folder: export_safetensors(model, folder, custom_mode=format))
    if broken is None:
        export(model, tmp_path / "m")
        return
    with pytest.raises(ModelError, match="does not read back"):
        export(model, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def changed(stored: Any, key: str) -> Any:
    """Codes with their rows the other way round, or scales twice as large."""
    return {**stored, key: stored[key].flip(0).contiguous() if key == "" else stored[key] * 2}


@pytest.mark.parametrize("key", ["", "scale"])
@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8", "mxfp4_weight_only"])
def test_files_are_read_back_before_they_take_their_place(
    scheme: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File by file: a broken writer is an error that names the tensor, and leaves no file."""
    from quark.torch.files import quantize

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=512)).save_pretrained(
        tmp_path / "m"
    )
    config, store = LLMTemplate.get("llama").get_config(scheme), quantize.store
    samples = [torch.arange(16)[None]]
    monkeypatch.setattr(quantize, "store", lambda *given: changed(store(*given), key))
    if (scheme, key) == ("mxfp4_weight_only", "scale"):
        monkeypatch.setattr(quantize, "store", lambda *given: {**(made := store(*given)), key: made[key] + 1})
    with pytest.raises(ModelError, match=r"layers.0.*weight' does not read back"):
        ModelQuantizer(config).direct_quantize_checkpoint(tmp_path / "m", tmp_path / "o", dataloader=samples)
    assert not list((tmp_path / "o").glob("*.safetensors"))
    monkeypatch.setattr(quantize, "store", store)
    ModelQuantizer(config).direct_quantize_checkpoint(tmp_path / "m", tmp_path / "o", dataloader=samples)


def test_a_float_tensor_is_read_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quark.torch.files import quantize

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=512))
    model.save_pretrained(tmp_path / "m")
    write = quantize.write_file

    def write_wrongly(path: Path, items: list[Any]) -> None:
        write(path, items)
        with path.open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([last[0] ^ 1]))

    monkeypatch.setattr(quantize, "write_file", write_wrongly)
    config = LLMTemplate.get("llama").get_config("int4_wo_32")
    with pytest.raises(ModelError, match="does not read back"):
        ModelQuantizer(config).direct_quantize_checkpoint(tmp_path / "m", tmp_path / "o")


@pytest.mark.parametrize("wrong", [lambda values: values * 2, lambda values: values[::-1].copy()])
def test_the_weights_of_a_graph_are_computed_and_compared(
    wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numpy_helper = pytest.importorskip("onnx.numpy_helper")
    pytest.importorskip("onnxscript")
    from quark.torch.export import onnx_model
    from quark.torch.export.api import export_onnx

    save = onnx_model.save

    def save_wrongly(proto: Any, path: Path) -> None:
        for tensor in proto.graph.initializer:
            if tensor.dims and "fc1.weight" in tensor.name and tensor.data_type == 1:
                tensor.CopyFrom(numpy_helper.from_array(wrong(numpy_helper.to_array(tensor)), tensor.name))
        save(proto, path)

    config = QConfig(QLayerConfig(weight=Int4PerGroupSpec(-1, 8).to_quantization_spec()))
    model = ModelQuantizer(config).quantize_model(TwoLayers())
    monkeypatch.setattr(onnx_model, "save", save_wrongly)
    with pytest.raises(ModelError, match=r"'fc1.weight' does not read back"):
        export_onnx(model, tmp_path / "m", torch.randn(2, 16))
    assert not (tmp_path / "m").exists()


def scales_in(state: dict[str, torch.Tensor], part: str, factor: float) -> dict[str, torch.Tensor]:
    """One scale of a layer's state is another."""
    value = state[part].clone()
    value.reshape(-1)[0] *= factor
    return {**state, part: value}


@pytest.mark.parametrize(
    ("part", "factor"), [(None, 1.0), ("weight_scale", 1.125), ("weight_global_scale", 1.01)], ids=str
)
def test_products_half_way_between_values_of_bfloat16(
    part: str | None, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """compressed-tensors divides by the scale of NVFP4 where we multiply; what is really another scale is seen."""
    pytest.importorskip("compressed_tensors")
    from tests.torch_flow.export.networks import IDS, llama

    from quark.torch.export import compressed_tensors

    model = llama(torch.bfloat16)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value *= 1 + 10 / 64 * (value.dim() == 2 and "layers" in name)  # found by search: 1.6 times 2^-8 off
    config = LLMTemplate.get("llama").get_config("nvfp4")
    made = ModelQuantizer(config).quantize_model(model, [{"input_ids": IDS}])
    own = compressed_tensors.state_of
    if part is None:
        compressed_tensors.export_compressed_tensors(made, tmp_path / "m", program="vllm")
        assert (tmp_path / "m" / "model.safetensors").is_file()
        return
    monkeypatch.setattr(compressed_tensors, "state_of", lambda *given: scales_in(own(*given), part, factor))
    with pytest.raises(ModelError, match="does not read back"):
        compressed_tensors.export_compressed_tensors(made, tmp_path / "m", program="vllm")
