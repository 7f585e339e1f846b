"""What the flow counts of the graph in memory against what is counted of the file that it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.onnx_flow import fused_models, models, wrapped
from tests.onnx_flow.test_passes import ZOO

from quark.cli import main
from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.coverage import coverage, float_layers

PRESETS = ("A8W8_CPU", "XINT8")


def fixed(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model for two rows: every free size is 2."""
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    for value in (*made.graph.input, *made.graph.output):
        for size in value.type.tensor_type.shape.dim:
            if not size.HasField("dim_value"):
                size.dim_value = 2
    return made


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ZOO)
def test_the_graph_in_memory_counts_as_the_file_does(name: str, preset: str, tmp_path: Path) -> None:
    config = get_default_config(preset)
    config.extra_options["FloatWhereFaster"] = False
    quantizer = ModelQuantizer(Config(global_quant_config=config))
    for model in (ZOO[name], fixed(ZOO[name])):
        onnx.save(model, tmp_path / "model.onnx")
        samples = [models.feeds(model, seed) for seed in range(2)]
        result = quantizer.run(tmp_path / "model.onnx", tmp_path / "q.onnx", samples)
        found = coverage(tmp_path / "q.onnx", samples[0])
        assert result.coverage == found
        assert result.counted in (found, None)
    assert result.counted is not None


def test_attention_operators_are_counted() -> None:
    """By hand: 2 sequences of 5 places of 8 numbers, projections of 24, scores and sums over 5 places."""
    model, length = fused_models.transformer(), 5
    counted = {one.name: one.macs for one in coverage(model, models.feeds(model)).layers}
    scores = 2 * (2 * length * 8) * length
    assert counted["y"] == counted["z"] == counted["t"] == scores + 2 * length * 8 * 24
    assert counted["v"] == scores // 2 + 2 * length * 8 * 20  # values of half the width


@pytest.mark.parametrize(
    ("node", "past"),
    [
        ("y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, k)", 0),
        ("y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, k, , , , p, p)", 4),
        ("y = Attention <q_num_heads = 2, kv_num_heads = 2> (q, k, k)", 0),
        ("y, u, w = Attention <q_num_heads = 2, kv_num_heads = 2> (q, k, k, , p, p)", 4),
    ],
)
def test_the_keys_of_attention_count_with_their_past(node: str, past: int) -> None:
    graph = f"attention (float[1, 3, 8] q, float[1, 7, 8] k, float[1, 2, 4, 4] p) => (float[1, 3, 8] y) {{ {node} }}"
    model = models.model(graph, {}, 23, ir_version=11, domains={"com.microsoft": 1})
    (found,) = coverage(model, models.feeds(model)).layers
    assert found.macs == 2 * (3 * 8) * (7 + past) and not found.integer


@pytest.mark.parametrize("way", [wrapped.in_a_branch, wrapped.in_a_loop, wrapped.in_a_scan])
def test_layers_of_bodies_are_called_as_in_plans(way: wrapped.Dress) -> None:
    """The last lines say why they stay in float; without their place nothing was said."""
    proto = models.cnn()
    inside, feed = way(proto, models.feeds(proto, 0))
    config = get_default_config("A8W8")
    config.op_types_to_quantize = ["Gemm", "MatMul"]
    result = ModelQuantizer(Config(global_quant_config=config)).run(inside, None, [feed])
    assert result.coverage is not None
    left = float_layers(result.coverage)
    assert left and all(result.plan.nodes[one.name].reason for one in left)


def test_every_command_counts_with_the_sizes_of_the_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A product whose size is free, beside a small layer: with sizes of 1 the layer is most of the model."""
    graph = """g (float[1, n, 4] x) => (float[1, n, n] y) {
        [small] a = MatMul(x, w) b = Transpose<perm = [0, 2, 1]>(a) y = MatMul(a, b) }"""
    onnx.save(models.model(graph, {"w": models.normal(4, 16)}), tmp_path / "model.onnx")
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(2, 32, 4)).astype(np.float32))
    files = [str(tmp_path / name) for name in ("model.onnx", "q.onnx")]
    data, words = ["--data", str(tmp_path / "x.npy"), "--json"], ["--exclude", "small", "--preset", "A8W8"]
    share = 32 / (4 + 32)
    for command in (
        ["quantize", files[0], "-o", files[1], *words],
        ["quantize", files[0], "-o", files[1], *words, "--no-check"],
        ["compare", *files],
    ):
        assert main(["onnx", *command, *data]) == 0
        reason = json.loads(capsys.readouterr().out)["verdict"]["coverage"]["reason"]
        assert reason.startswith(f"{100 * share:.0f} % of the multiplications"), command
