"""AdaRound and AdaQuant in the flow: every kind of layer and type, settings that act, resuming, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from tests.onnx_flow import models
from tests.pairs import pairs

from quark.config.presets import PRESETS
from quark.errors import ConfigError
from quark.onnx import (
    AdaQuantConfig,
    AdaRoundConfig,
    BFloat16Spec,
    BFP16Spec,
    CalibMethod,
    CalibrationDataReader,
    CLEConfig,
    Int4Spec,
    Int8Spec,
    Int16Spec,
    ModelQuantizer,
    MXFP4E2M1Spec,
    MXInt8Spec,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    XInt8Spec,
)
from quark.onnx.algorithms import finetune
from quark.onnx.algorithms.forward import ACTIVATIONS, forward_of
from quark.onnx.algorithms.walk import GraphWalk
from quark.onnx.graph.model import load
from quark.onnx.graph.session import Runtime

pytest.importorskip("torch")
CHANNEL = QuantGranularity.Channel


def net() -> onnx.ModelProto:
    """Conv, Relu, depthwise Conv, LeakyRelu, ConvTranspose, Clip, mean, Flatten, Gemm, MatMul."""
    graph = """
    net (float[N, 3, 8, 8] x) => (float[N, 5] y) {
        c1 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1, b1)
        a1 = Relu (c1)
        c2 = Conv <group = 8, kernel_shape = [3, 3], auto_pad = "SAME_UPPER", strides = [2, 2]> (a1, w2)
        a2 = LeakyRelu <alpha = 0.2> (c2)
        c3 = ConvTranspose <strides = [2, 2], pads = [0, 0, 1, 0]> (a2, w3, b3)
        a3 = Clip (c3, zero, six)
        m = GlobalAveragePool (a3)
        f = Flatten (m)
        g = Gemm <transB = 1> (f, v1, d1)
        y = MatMul (g, v2)
    }"""
    weights = {
        "w1": models.normal(8, 3, 3, 3), "b1": models.normal(8), "w2": models.normal(8, 1, 3, 3),
        "w3": models.normal(8, 6, 2, 2), "b3": models.normal(6), "v1": models.normal(20, 6), "d1": models.normal(20),
        "v2": models.normal(20, 5), "zero": np.float32(0).reshape(()), "six": np.float32(6).reshape(()),
    }  # fmt: skip
    proto = models.model(graph, weights)
    for index, node in enumerate(proto.graph.node):
        node.name = f"{node.op_type}_{index}"
    return proto


NET = net()
SAMPLES = [models.feeds(NET, seed=seed, unknown=1) for seed in range(12)]
FAST = {"num_iterations": 60, "log_period": 0}


def quantized(config: QConfig, samples: object = SAMPLES) -> onnx.ModelProto:
    made = ModelQuantizer(config).quantize_model(NET, None, samples)
    assert made is not None
    return made


def config(spec, algos: list, weight=None, **options: object) -> QConfig:
    layer = QLayerConfig(input_tensors=spec, weight=weight or spec)
    return QConfig(layer, algo_config=algos, extra_options={"PrintSummary": False, **options})


def loss(proto: onnx.ModelProto) -> float:
    run, reference = models.session(proto), models.session(NET)
    return float(np.mean([np.square(run.run(None, s)[0] - reference.run(None, s)[0]).mean() for s in SAMPLES]))


INT8 = Int8Spec(calibration_method=CalibMethod.MinMax)


@pytest.mark.parametrize(
    ("spec", "weight"),
    [
        (INT8, Int8Spec(calibration_method=CalibMethod.MinMax)),
        (INT8, Int8Spec(quant_granularity=CHANNEL)),
        (INT8, Int4Spec(quant_granularity=CHANNEL)),
        (Int16Spec(), Int4Spec()),
        (XInt8Spec(), XInt8Spec()),
    ],
    ids=["int8", "channel", "int4", "int4 under int16", "xint8"],
)
def test_adaround_is_better_than_rounding_to_nearest(spec, weight) -> None:
    plain = loss(quantized(config(spec, [], weight)))
    tuned = quantized(config(spec, [AdaRoundConfig(**FAST)], weight))
    onnx.checker.check_model(tuned, full_check=True)
    assert loss(tuned) < plain


@pytest.mark.parametrize("spec", [BFP16Spec, MXInt8Spec, MXFP4E2M1Spec, BFloat16Spec, XInt8Spec])
def test_adaquant_is_no_worse_than_rounding_to_nearest(spec) -> None:
    algorithm = AdaQuantConfig(learning_rate=3e-3, update_bias=True, **FAST)
    plain, tuned = (loss(quantized(config(spec(), algos))) for algos in ([], [algorithm]))
    assert tuned < plain * (1.0 if spec is not BFloat16Spec else 1.05)


def test_the_codes_of_the_file_are_what_was_trained() -> None:
    plain, tuned = (quantized(config(INT8, algos)) for algos in ([], [AdaRoundConfig(**FAST)]))
    codes = [{t.name: onnx.numpy_helper.to_array(t).astype(int) for t in p.graph.initializer} for p in (plain, tuned)]
    moved = [np.abs(codes[0][name] - codes[1][name]) for name in codes[0] if name.endswith("_quantized")]
    assert max(int(m.max()) for m in moved) == 1 and sum(int((m > 0).sum()) for m in moved) > 20
    scales = [name for name in codes[0] if name.endswith("_scale")]
    stored = [{t.name: onnx.numpy_helper.to_array(t) for t in p.graph.initializer} for p in (plain, tuned)]
    for name in scales:
        np.testing.assert_array_equal(stored[0][name], stored[1][name])


def result(**changes: object) -> onnx.ModelProto:
    return quantized(config(INT8, [AdaRoundConfig(**{**FAST, "num_iterations": 25, **changes})]))


BASE = result().SerializeToString()


@pytest.mark.parametrize(
    "change",
    [
        {"fixed_seed": 7}, {"data_size": 3}, {"batch_size": 4}, {"num_iterations": 9}, {"learning_rate": 0.5},
        {"lr_adjust": (0.0, 0.5)}, {"target_op_type": ["Conv"]},
        {"output_qdq": True}, {"drop_ratio": 0.0}, {"dynamic_batch": True, "batch_size": 4},
        {"layers": ["Conv_0", "^Gemm"]}, {"reg_param": 1.0}, {"beta_range": (4, 1.1)}, {"warm_start": 1.0},
        {"shrinkage": False},
    ],
    ids=str,
)  # fmt: skip
def test_a_setting_has_an_effect(change: dict[str, object]) -> None:
    assert result(**change).SerializeToString() != BASE


def test_early_stopping_ends_adaquant_at_a_stretch_without_gain() -> None:
    made = [
        quantized(config(INT8, [AdaQuantConfig(num_iterations=40, learning_rate=3e-3, **early)])).SerializeToString()
        for early in ({}, {"early_stop": True}, {"early_stop": True, "num_batches": 2})
    ]
    assert len(set(made)) == 3


@pytest.mark.parametrize("change", [{"mem_opt_level": 0}, {"mem_opt_level": 2}, {"num_workers": 2}], ids=str)
def test_how_the_data_are_kept_changes_nothing(change: dict[str, object]) -> None:
    assert result(**change).SerializeToString() == BASE


def test_level_2_writes_into_the_given_folder(tmp_path: Path) -> None:
    assert result(mem_opt_level=2, cache_dir=str(tmp_path / "cache")).SerializeToString() == BASE
    assert (tmp_path / "cache").is_dir()


def test_a_selective_update_brings_the_output_nearer() -> None:
    plain, chosen = quantized(config(INT8, [])), result(selective_update=True)
    assert loss(chosen) <= loss(plain)


def test_a_layer_that_got_worse_is_put_back_and_said() -> None:
    hasty = AdaRoundConfig(num_iterations=2, learning_rate=1e4, log_period=0, fixed_seed=3)
    made = ModelQuantizer(config(INT8, [hasty])).run(NET, None, SAMPLES)
    (report,) = [one for one in made.passes if one.name == "adaround"]
    back = [line for line in report.refused if "is put back: training did not lower its error of" in line]
    assert report.fired == 0 and len(back) == 5
    assert made.proto.SerializeToString() == quantized(config(INT8, [])).SerializeToString()


def test_a_selective_update_says_what_it_put_back() -> None:
    hasty = AdaRoundConfig(**{**FAST, "num_iterations": 25}, selective_update=True, learning_rate=10.0)
    passes = ModelQuantizer(config(INT8, [hasty])).run(NET, None, SAMPLES).passes
    (report,) = [one for one in passes if one.name == "adaround"]
    assert any("did not bring the model's output nearer" in line for line in report.refused)


def test_the_largest_layer_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    real = finetune.adaround

    def watched(layer, codes, data, settings, round_bias):  # type: ignore[no-untyped-def]
        tried.append((layer.name, settings.iterations, len(data.inputs)))
        return real(layer, codes, data, settings, round_bias)

    monkeypatch.setattr(finetune, "adaround", watched)
    assert result(select_max_mem_layer=True).SerializeToString() == BASE
    assert tried[0] == ("Conv_0", 1, 1) and len(tried) == 6

    def full(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(finetune, "adaround", full)
    with pytest.raises(ConfigError, match=r"select_max_mem_layer: one step of 'Conv_0'.*out of memory.*batch_size"):
        result(select_max_mem_layer=True)


def test_the_log_has_a_line_every_so_many_steps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="quark.algorithms.training"):
        result(num_iterations=20, log_period=10, target_op_type=["Gemm"])
    assert [record.getMessage().split(",")[0] for record in caplog.records if "step " in record.getMessage()] == [
        "Gemm_8: step 10",
        "Gemm_8: step 20",
    ]


@pytest.mark.parametrize("kind", [AdaRoundConfig(), AdaQuantConfig(learning_rate=3e-3)], ids=lambda one: one.name)
def test_biases_are_trained_on_request(kind: AdaRoundConfig | AdaQuantConfig) -> None:
    made = [quantized(config(INT8, [replace(kind, num_iterations=25, update_bias=on)])) for on in (False, True)]
    biases = [
        {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer if t.name.startswith(("b1", "d1"))}
        for proto in (quantized(config(INT8, [])), *made)
    ]
    same = [all(np.array_equal(biases[0][name], one[name]) for name in biases[0]) for one in biases[1:]]
    assert biases[0] and same == [True, False]


def test_a_reference_model_gives_the_targets(tmp_path: Path) -> None:
    onnx.save(NET, tmp_path / "same.onnx")
    assert result(ref_model_path=str(tmp_path / "same.onnx")).SerializeToString() == BASE
    other = net()
    for tensor in other.graph.initializer:
        if tensor.name == "b1":
            tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) + 1, "b1"))
    onnx.save(other, tmp_path / "other.onnx")
    assert result(ref_model_path=str(tmp_path / "other.onnx")).SerializeToString() != BASE


def test_layers_that_do_not_depend_on_each_other_are_trained_together() -> None:
    graph = """
    branches (float[1, 4, 6, 6] x) => (float[1, 8, 6, 6] y) {
        a = Conv (x, w1)
        b = Conv (x, w2)
        c = Relu (a)
        y = Concat <axis = 1> (c, b)
    }"""
    proto = models.model(graph, {"w1": models.normal(4, 4, 1, 1), "w2": models.normal(4, 4, 1, 1, seed=1)})
    samples = [models.feeds(proto, seed=seed) for seed in range(4)]
    made = [
        ModelQuantizer(config(INT8, [AdaRoundConfig(parallel=parallel, num_workers=2, **FAST)])).quantize_model(
            proto, None, samples
        )
        for parallel in (False, True)
    ]
    assert made[0].SerializeToString() == made[1].SerializeToString()


def test_a_killed_run_goes_on_and_gives_the_same_file(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def progress(stage: str, done: int, total: int | None) -> None:
        if stage == "adaround" and done == 3:
            raise Killed

    resumable = config(
        INT8, [AdaRoundConfig(**{**FAST, "num_iterations": 25})], SaveAndRestore=str(tmp_path / "state.json")
    )
    with pytest.raises(Killed):
        ModelQuantizer(resumable).run(NET, None, SAMPLES, progress)
    assert quantized(resumable).SerializeToString() == BASE


class Once(CalibrationDataReader):
    """A reader as in AMD Quark's examples: ``get_next`` and nothing else."""

    def __init__(self) -> None:
        self.samples = iter(SAMPLES)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.samples, None)


@pytest.mark.parametrize("reader", [Once, lambda: iter(SAMPLES)], ids=["reader", "iterator"])
def test_a_reader_that_can_be_read_once_is_enough(reader) -> None:
    once = quantized(config(INT8, [AdaRoundConfig(**{**FAST, "num_iterations": 25})]), reader())
    assert once.SerializeToString() == BASE


def test_algorithms_are_combined_in_the_order_given() -> None:
    algos = [CLEConfig(), AdaRoundConfig(**FAST), AdaQuantConfig(learning_rate=1e-3, **FAST)]
    report = ModelQuantizer(config(INT8, algos)).run(NET, None, SAMPLES).passes
    assert [one.name for one in report if one.name in ("cle", "adaround", "adaquant")] == [
        "cle",
        "adaround",
        "adaquant",
    ]
    swapped = ModelQuantizer(config(INT8, algos[::-1])).run(NET, None, SAMPLES).passes
    assert [one.name for one in swapped if one.name[:3] == "ada"] == ["adaquant", "adaround"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AdaRoundConfig(target_op_type=["Cov"]), r"target_op_type.*Did you mean 'Conv'"),
        (lambda: result(layers=["Conv_O"]), r"layers: the node name 'Conv_O' matches no node.*Did you mean 'Conv_"),
        (lambda: result(layers="Conv_0"), "layers='Conv_0' must be"),
        (lambda: AdaRoundConfig(cache_dir=5), "cache_dir=5 must be"),
        (lambda: AdaQuantConfig(reg_param=0.1), "reg_param=0.1 must be 0.01: only AdaRoundConfig"),
        (lambda: AdaQuantConfig(beta_range=[10, 2]), "beta_range"),
        (lambda: AdaQuantConfig(warm_start=0.5), "warm_start"),
        (lambda: result(infer_device="rocm:1"), "infer_device: this ONNX Runtime has no ROCMExecutionProvider"),
        (lambda: AdaRoundConfig(num_iterations=0), "num_iterations"),
        (lambda: AdaRoundConfig(drop_ratio=1.5), "drop_ratio"),
        (lambda: AdaQuantConfig(mem_opt_level=3), "mem_opt_level"),
        (lambda: AdaQuantConfig(target_op_type=["Convolution"]), "target_op_type"),
        (lambda: AdaQuantConfig(beta_range=3), "beta_range"),
        (lambda: AdaQuantConfig(early_stop=1), "early_stop"),
        (lambda: AdaQuantConfig(use_gds=True), "use_gds"),
        (lambda: quantized(config(BFP16Spec(), [AdaRoundConfig(**FAST)])), "bfp16; use AdaQuant"),
        (lambda: result(optim_device="warp"), "optim_device"),
        (lambda: result(infer_device="warp"), "infer_device"),
        (lambda: result(output_index=4, selective_update=True), "output_index"),
        (lambda: result(target_op_type=["InstanceNormalization"]), "nothing to train"),
    ],
)
def test_bad_settings_are_refused_by_name(make, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


# ---- nothing to train ------------------------------------------------------------------------------------------------

TRAINING = [name for name in PRESETS if "ADAROUND" in name or "ADAQUANT" in name]
UNTRAINABLE = {
    "no layer": (
        "no (float[2, 8, 4] x) => (float[2, 8, 4] y) { a = Add (x, c)  s = Sigmoid (a)  y = Mul (a, s) }",
        {"c": models.normal(8, 1)},
    ),
    "weights are computed": (
        "wc (float[2, 8, 4] x, float[2, 4, 5] w) => (float[2, 8, 5] y) { k = Relu (w) m = MatMul (x, k) y = Tanh (m) }",
        {},
    ),
}


@pytest.mark.parametrize(("preset", "kind"), pairs(TRAINING, UNTRAINABLE))
def test_presets_quantize_models_that_have_nothing_to_train(preset: str, kind: str) -> None:
    proto = models.model(*UNTRAINABLE[kind])
    chosen = QConfig.get_default_config(preset)
    chosen.global_quant_config.extra_options["PrintSummary"] = False
    made = ModelQuantizer(chosen).run(proto, None, [models.feeds(proto, seed=seed) for seed in range(2)])
    assert made.plan.tensors
    (said,) = [one for one in made.passes if one.name in ("adaround", "adaquant")]
    assert said.fired == 0
    assert "finds nothing to train" in said.refused[0]


# ---- the parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Conv_0", "Conv_2", "ConvTranspose_4", "Gemm_8", "MatMul_9"])
def test_a_layer_in_torch_answers_as_in_the_runtime(name: str) -> None:
    import torch

    model = load(NET)
    node = next(n for n in model.graph if n.name == name)
    reader = next((use for use in node.outputs[0].consumers() if use.op_type in ACTIVATIONS), None)
    wanted = [str(node.inputs[0].name), str((reader or node).outputs[0].name)]
    walk = GraphWalk(model, SAMPLES[:1], wanted, Runtime())
    found = {key: value for name in wanted for key, value in walk.advance([name])[0].items()}
    forward = forward_of(node, reader, torch)
    constants = [None if v is None else torch.from_numpy(v.const_value.numpy().copy()) for v in node.inputs[1:3]]
    answer = forward(torch.from_numpy(found[wanted[0]].copy()), *[*constants, None][:2])
    np.testing.assert_allclose(answer.numpy(), found[wanted[1]], rtol=1e-4, atol=1e-4)


def test_a_walk_runs_every_node_once_and_keeps_little() -> None:
    model = load(NET)
    names = [str(value.name) for node in model.graph for value in node.outputs]
    whole = GraphWalk(model, SAMPLES[:2], names, Runtime()).advance(names)
    walk = GraphWalk(model, SAMPLES[:2], names[2::3], Runtime())
    for name in names[2::3]:
        for sample, expected in zip(walk.advance([name]), whole, strict=True):
            np.testing.assert_allclose(sample[name], expected[name], rtol=1e-5, atol=1e-6)
        assert len(walk._live[0]) <= 2


def test_a_walk_goes_through_bodies_that_read_the_main_graph() -> None:
    graph = """
    branching (float[2, 3] x, bool go) => (float[2, 3] y) {
        a = Relu (x)
        b = If (go) <
            then_branch = yes () => (float[2, 3] p) { p = Neg (a) },
            else_branch = no () => (float[2, 3] q) { q = Identity (a) }
        >
        y = Add (b, a)
    }"""
    model = load(models.model(graph))
    feed = {"x": models.normal(2, 3), "go": np.array(True)}
    walk = GraphWalk(model, [feed], ["a", "y"], Runtime())
    a = walk.advance(["a"])[0]["a"]
    np.testing.assert_allclose(walk.advance(["y"])[0]["y"], 0 * a)
    assert isinstance(model, ir.Model)
