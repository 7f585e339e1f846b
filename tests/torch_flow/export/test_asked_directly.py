"""Decisions of the exports that whole files rarely meet: each asked directly, of every value that it tells apart."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quark.torch.export import decoded, formats, gguf_vocabulary, gptq, shards, verify
from quark.torch.quantization.config.config import Int4PerChannelSpec, Int4PerGroupSpec, QConfig, QLayerConfig

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
def test_narrow_integers_beside_dynamic_activations_are_packed(strategy: str, packed: bool, dynamic: bool) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    from quark.torch.export.compressed_tensors import format_of

    size = {"group_size": 32} if strategy == "group" else {}
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy=strategy, **size)
    inputs = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    given = inputs if dynamic else QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="tensor")
    found = format_of(QuantizationScheme(targets=["Linear"], weights=weights, input_activations=given))
    assert (found.value == "pack-quantized") is (packed and dynamic)


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
    from quark.errors import ModelError

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
    """Readers take -1 for one group as long as a row."""
    config = QConfig(global_quant_config=QLayerConfig(weight=spec.to_quantization_spec()))
    assert gptq.gptq_config(config, "gptq_v2", ())["group_size"] == size


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
