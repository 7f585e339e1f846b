"""Stored tensors: the bytes of the peer, and every scheme back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.pairs import thinned
from tests.torch_flow.export.schemes import Weight, every

from quark.torch.config.model import QLayerConfig
from quark.torch.export.layout import layout_of_quantizer, store
from quark.torch.fake_quantize import Quantizer, calibrate_with, make_quantizer
from quark.torch.quantization.config.config import (
    AmdFP4Spec,
    DataTypeSpec,
    FP8E4M3PerTensorSpec,
    Int3PerGroupSpec,
    Int4PerChannelSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
    OCP_MXFP6E2M3Spec,
    OCP_MXFP6E3M2Spec,
    Uint4PerGroupSpec,
    Uint8PerGroupSpec,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "packing_linear.json"
SCHEMES = every()
GENERATOR = torch.Generator().manual_seed(11)
MATRIX = torch.randn(24, 64, generator=GENERATOR) * torch.linspace(0.05, 3, 24)[:, None]
KERNEL = torch.randn(16, 32, 3, 3, generator=GENERATOR) * torch.linspace(0.05, 3, 16)[:, None, None, None]
OF_PEER: dict[str, DataTypeSpec] = {
    "int4 per_group 32": Int4PerGroupSpec(-1, 32),
    "uint4 per_group 32": Uint4PerGroupSpec(-1, 32),
    "int4 per_channel": Int4PerChannelSpec(0),
    "int8 per_tensor": Int8PerTensorSpec(),
    "int8 per_channel": Int8PerChannelSpec(0, symmetric=True),
    "uint8 per_group 32": Uint8PerGroupSpec(-1, 32),
    "fp8 per_tensor": FP8E4M3PerTensorSpec(),
    "mxfp4": OCP_MXFP4Spec(-1, False),
    "mxfp6_e2m3": OCP_MXFP6E2M3Spec(-1, False),
    "mxfp6_e3m2": OCP_MXFP6E3M2Spec(-1, False),
    "amdfp4 g16": AmdFP4Spec(-1, 16, False),
}


def quantizer_for(config: Weight, x: torch.Tensor) -> Quantizer:
    stages = QLayerConfig(weight=config).stages("weight")
    quantizer = make_quantizer(stages, "weight", constant=True)
    calibrate_with(quantizer, x)
    return quantizer


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()


@pytest.mark.parametrize("name", thinned(SCHEMES, 2))
def test_values_come_back_bit_for_bit(name: str) -> None:
    for x in (MATRIX, MATRIX.bfloat16(), KERNEL):
        quantizer = quantizer_for(SCHEMES[name], x)
        expected, shape = quantizer(x), tuple(x.shape)
        for pack_method in ("reorder", "order"):
            layout, stored = layout_of_quantizer(quantizer, shape, pack_method), store(x, quantizer, pack_method)
            assert {key: (tuple(value.shape), value.dtype) for key, value in stored.items()} == layout.form()
            assert same_bits(layout.restore(stored).to(x.dtype).float(), expected.float())


@pytest.mark.parametrize("name", [name for name in SCHEMES if "dynamic" not in name])
def test_frozen_values_are_stored_as_they_are(name: str) -> None:
    for x in (MATRIX, MATRIX.bfloat16()):
        quantizer = quantizer_for(SCHEMES[name], x)
        frozen = quantizer(x)
        back = layout_of_quantizer(quantizer, tuple(x.shape)).restore(store(frozen, quantizer, frozen=True))
        assert torch.equal(back.to(x.dtype), frozen)


def test_a_ragged_matrix_comes_back() -> None:
    x = MATRIX[:13, :45].contiguous()
    whole = {name: spec for name, spec in SCHEMES.items() if "group-" not in name and "group0" not in name}
    for config in whole.values():
        quantizer = quantizer_for(config, x)
        layout = layout_of_quantizer(quantizer, tuple(x.shape))
        stored = store(x, quantizer)
        assert {key: (tuple(value.shape), value.dtype) for key, value in stored.items()} == layout.form()
        assert torch.equal(layout.restore(stored), quantizer(x))


def tensor_of(entry: dict) -> torch.Tensor:
    dtype = getattr(torch, entry["dtype"])
    values = torch.tensor(entry["bytes"], dtype=torch.uint8) if "bytes" in entry else torch.tensor(entry["value"])
    return (values.view(dtype) if "bytes" in entry else values.to(dtype)).reshape(entry["shape"])


@pytest.mark.parametrize("scheme", OF_PEER)
def test_what_the_peer_stores_is_read(scheme: str) -> None:
    case = next(case for case in json.loads(GOLDEN.read_text())["peer_linear"] if case["scheme"] == scheme)
    frozen = torch.tensor(case["frozen_weight"])
    quantizer = quantizer_for(OF_PEER[scheme].to_quantization_spec(), frozen)
    names = {"": "weight", "scale": "weight_quantizer.scale", "zero_point": "weight_quantizer.zero_point"}
    stored = {key: tensor_of(case["stored"][name]) for key, name in names.items() if name in case["stored"]}
    layout = layout_of_quantizer(quantizer, tuple(frozen.shape))
    assert {key: (tuple(value.shape), value.dtype) for key, value in stored.items()} == layout.form()
    assert torch.allclose(layout.restore(stored), frozen, rtol=2e-7, atol=0)


def test_order_and_reorder_of_words() -> None:
    x = torch.arange(8.0)[:, None].expand(8, 32).contiguous()  # code = output feature, so a word holds 0..7
    quantizer = quantizer_for(Uint4PerGroupSpec(-1, 32).to_quantization_spec(), x)
    quantizer.scale, quantizer.zero_point = torch.ones(8, 1), torch.zeros(8, 1, dtype=torch.int32)
    words = {method: store(x, quantizer, method)[""][0, 0].item() & 0xFFFFFFFF for method in ("order", "reorder")}
    assert words == {"order": 0x76543210, "reorder": 0x75316420}


def test_int3_groups_of_the_bits_of_the_peer() -> None:
    codes = torch.tensor([[0.0, 1, 2, 3, -4, -3, -2, -1]])
    quantizer = quantizer_for(Int3PerGroupSpec(-1, 8).to_quantization_spec(), codes)
    quantizer.scale = torch.ones(1, 1)
    assert store(codes, quantizer)[""].tolist() == [[0x88, 0xC6, 0xFA]]
