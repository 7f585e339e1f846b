"""Cross-layer equalization in a graph: the function stays, ranges come together, everything else is left alone."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.errors import ConfigError
from quark.onnx import CLEConfig, Config, ModelQuantizer, QConfig, get_default_config
from quark.onnx.algorithms import cle
from quark.onnx.graph.model import load, to_proto


def spread(*shape: int, seed: int) -> np.ndarray:
    """Weights whose output channels differ in size by orders of magnitude."""
    rng = np.random.default_rng([seed, *shape])
    sizes = np.exp(rng.normal(0, 1.5, (shape[0], *[1] * (len(shape) - 1))))
    return (rng.standard_normal(shape) * sizes).astype(np.float32)


def net(between: str = "Relu", group_attribute: bool = True) -> onnx.ModelProto:
    """Conv, activation, Conv, LeakyRelu, Pad, depthwise Conv, Relu, Conv, mean, Flatten; Gemm, Relu, Gemm."""
    group = "group = 1, " if group_attribute else ""
    graph = f"""
    net (float[N, 3, 8, 8] x) => (float[N, 5] y) {{
        c1 = Conv <{group}kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1, b1)
        a1 = {between} (c1)
        c2 = Conv <kernel_shape = [1, 1]> (a1, w2, b2)
        a2 = LeakyRelu <alpha = 0.2> (c2)
        p2 = Pad (a2, pads)
        c3 = Conv <group = 12, kernel_shape = [3, 3]> (p2, w3, b3)
        a3 = Relu (c3)
        c4 = Conv <kernel_shape = [1, 1]> (a3, w4)
        m4 = ReduceMean <axes = [2, 3], keepdims = 1> (c4)
        f = Flatten (m4)
        g1 = Gemm <transB = 1> (f, v1, d1)
        r1 = Relu (g1)
        y = Gemm (r1, v2, d2)
    }}"""
    weights = {
        "w1": spread(8, 3, 3, 3, seed=1), "b1": spread(8, seed=2), "w2": spread(12, 8, 1, 1, seed=3),
        "b2": spread(12, seed=4), "w3": spread(12, 1, 3, 3, seed=5), "b3": spread(12, seed=6),
        "w4": spread(6, 12, 1, 1, seed=7), "v1": spread(20, 6, seed=8), "d1": spread(20, seed=9),
        "v2": spread(20, 5, seed=10), "d2": spread(5, seed=11), "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    }  # fmt: skip
    return models.model(graph, weights)


def equalized(proto: onnx.ModelProto, config: CLEConfig = CLEConfig()) -> tuple[onnx.ModelProto, int]:  # noqa: B008
    model = load(proto)
    report = cle.run(model, config)
    return to_proto(model), report.fired


def weights_of(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


@pytest.mark.parametrize("steps", [1, 3, -1])
def test_the_function_stays(steps: int) -> None:
    proto = net()
    after, fired = equalized(proto, CLEConfig(cle_steps=steps))
    assert fired >= 4
    feeds = models.feeds(proto)
    models.assert_close(models.run(after, feeds), models.run(proto, feeds), 1e-5)
    before, now = weights_of(proto), weights_of(after)
    assert not any(np.array_equal(before[name], now[name]) for name in ("w1", "w2", "w3", "w4", "v1", "v2"))


def test_transposed_convolutions_and_prelu_take_part() -> None:
    """A slope per channel between them, and weights of shape [read, made, ...]: the function stays."""
    graph = """
    up (float[1, 6, 5, 5] x) => (float[1, 3, 7, 7] y) {
        a = ConvTranspose <group = 6, kernel_shape = [3, 3]> (x, w1, b1)
        p = PRelu (a, slope)
        c = ConvTranspose <kernel_shape = [1, 1]> (p, w2, b2)
        r = Relu (c)
        y = Conv <kernel_shape = [1, 1]> (r, w3)
    }"""
    weights = {
        "w1": spread(6, 1, 3, 3, seed=1), "b1": spread(6, seed=2), "slope": np.abs(spread(6, 1, 1, seed=3)),
        "w2": spread(6, 8, 1, 1, seed=4), "b2": spread(8, seed=5), "w3": spread(3, 8, 1, 1, seed=6),
    }  # fmt: skip
    proto = models.model(graph, weights)
    after, fired = equalized(proto)
    feeds = models.feeds(proto)
    models.assert_close(models.run(after, feeds), models.run(proto, feeds), 1e-5)
    now = weights_of(after)
    assert fired >= 2
    assert not any(np.array_equal(weights[name], now[name]) for name in ("w1", "b1", "w2", "b2", "w3"))
    np.testing.assert_array_equal(weights["slope"], now["slope"])
    made = np.abs(now["w1"]).max((1, 2, 3))
    assert made.max() / made.min() < 0.5 * np.abs(weights["w1"]).max() / np.abs(weights["w1"]).max((1, 2, 3)).min()


def test_ranges_come_together() -> None:
    config = CLEConfig(cle_steps=-1, cle_scale_append_bias=False, cle_scale_use_threshold=False)
    now = weights_of(equalized(net(), config)[0])
    made, read = np.abs(now["v1"]).max(1), np.abs(now["v2"]).max(1)
    np.testing.assert_allclose(made, read, rtol=1e-4)
    rows = [np.abs(now["w3"]).max((1, 2, 3)), np.abs(now["w4"]).max((0, 2, 3))]
    np.testing.assert_allclose(rows[0], rows[1], rtol=0.05)


def test_a_convolution_without_a_group_attribute_takes_part() -> None:
    before, now = (weights_of(proto) for proto in (net(), equalized(net(group_attribute=False))[0]))
    assert not np.array_equal(before["w1"], now["w1"])


@pytest.mark.parametrize("between", ["Sigmoid", "Clip", "Tanh"])
def test_nothing_goes_through_a_function_that_does_not_scale(between: str) -> None:
    before, now = (weights_of(proto) for proto in (net(between), equalized(net(between))[0]))
    np.testing.assert_array_equal(before["w1"], now["w1"])


def test_a_weight_that_others_read_is_copied() -> None:
    graph = """
    shared (float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] y, float[1, 4, 5, 5] z) {
        a = Conv (x, w)
        b = Relu (a)
        y = Conv (b, w)
        z = Conv (x, w)
    }"""
    proto = models.model(graph, {"w": spread(4, 4, 1, 1, seed=1)})
    after, fired = equalized(proto)
    assert fired
    feeds = models.feeds(proto)
    models.assert_close(models.run(after, feeds), models.run(proto, feeds), 1e-5)


def test_results_that_two_nodes_read_are_left_alone() -> None:
    graph = """
    forked (float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] y) {
        a = Conv (x, w)
        b = Relu (a)
        c = Conv (b, v)
        y = Add (c, b)
    }"""
    proto = models.model(graph, {"w": spread(4, 4, 1, 1, seed=1), "v": spread(4, 4, 1, 1, seed=2)})
    assert equalized(proto)[1] == 0


def test_replace_clip6_relu_lets_it_through() -> None:
    graph = """
    capped (float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] y) {
        a = Conv (x, w)
        b = Clip (a, lo, hi)
        y = Conv (b, v)
    }"""
    numbers = {"lo": np.float32(0).reshape(()), "hi": np.float32(6).reshape(())}
    proto = models.model(graph, {"w": spread(4, 4, 1, 1, seed=1), "v": spread(4, 4, 1, 1, seed=2), **numbers})
    for replace, kept in ((False, "Clip"), (True, "Relu")):
        config = QConfig(algo_config=[CLEConfig()], extra_options={"ReplaceClip6Relu": replace, "PrintSummary": False})
        quantized = ModelQuantizer(config).quantize_model(proto, None, [models.feeds(proto)])
        assert {"Clip", "Relu"} & set(models.op_types(quantized)) == {kept}


@pytest.mark.parametrize(
    "inside",
    [
        "t = Add (a, three) c = Clip (t, lo, hi) m = Mul (a, c) b = Div (m, hi)",  # HardSwish as exporters write it
        "b = Clip (a, lo, hi) s = Sigmoid (b)",  # a second reader
        "m = Sigmoid (a) b = Clip (m, lo, hi)",
    ],
)
def test_a_clip_that_no_scale_can_move_through_stays(inside: str) -> None:
    """As a Relu it would be another function, and equalization would win nothing."""
    more = ", float[1, 4, 5, 5] s" if "s = " in inside else ""
    graph = f"""
    capped (float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] y{more}) {{
        a = Conv (x, w)
        {inside}
        y = Conv (b, v)
    }}"""
    numbers = {name: np.float32(value).reshape(()) for name, value in (("lo", 0), ("hi", 6), ("three", 3))}
    numbers = {name: value for name, value in numbers.items() if name != "three" or name in inside}
    proto = models.model(graph, {"w": 9 * spread(4, 4, 1, 1, seed=1), "v": spread(4, 4, 1, 1, seed=2), **numbers})
    after = load(proto)
    cle.run(after, CLEConfig(), replace_clip6=True)
    assert "Clip" in [node.op_type for node in after.graph]
    feeds = models.feeds(proto)
    models.assert_close(models.run(to_proto(after), feeds), models.run(proto, feeds), 1e-5)


def test_it_saves_per_tensor_weights() -> None:
    proto = net()
    samples = [models.feeds(proto, seed=k) for k in range(8)]
    errors = []
    for include in (False, True):
        config = get_default_config("XINT8")
        config.print_summary, config.include_cle = False, include
        quantized = ModelQuantizer(Config(config)).quantize_model(proto, None, samples)
        found = [models.run(quantized, feed)[0] - models.run(proto, feed)[0] for feed in samples]
        errors.append(float(np.mean(np.square(found))))
    assert errors[1] < 0.7 * errors[0]


def test_legacy_presets_have_it_and_qconfig_does_not() -> None:
    assert [entry.name for entry in Config(get_default_config("XINT8")).compile().algorithms] == ["cle"]
    assert QConfig().compile().algorithms == ()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CLEConfig(cle_steps=0), "cle_steps"),
        (lambda: CLEConfig(cle_steps=2.5), "cle_steps"),
        (lambda: CLEConfig(cle_balance_method="mean"), "cle_balance_method"),
        (lambda: CLEConfig(cle_weight_threshold=-1.0), "cle_weight_threshold"),
        (lambda: CLEConfig(cle_scale_append_bias=1), "cle_scale_append_bias"),
        (lambda: QConfig(algo_config=["cle"]), "algo_config"),
        (lambda: QConfig(algo_config=[CLEConfig]), "CLEConfig"),
        (lambda: QConfig(algo_config=[CLEConfig(), CLEConfig()]), "twice|2 times"),
        (lambda: QConfig(algo_config=CLEConfig()), "list"),
    ],
)
def test_bad_settings_are_refused_by_name(make, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    "changed",
    [
        {"cle_steps": 2},
        {"cle_weight_threshold": 5.0},
        {"cle_scale_append_bias": False},
        {"cle_scale_use_threshold": False},
    ],
    ids=str,
)
def test_a_field_has_an_effect(changed: dict[str, object]) -> None:
    proto = net()
    for tensor in proto.graph.initializer:  # small channels, which the default threshold leaves alone
        if tensor.name in ("w1", "w2"):
            values = onnx.numpy_helper.to_array(tensor).copy()
            values[:2] *= 1e-3
            values[:, :2] *= 1e-3
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    base, other = (weights_of(equalized(proto, CLEConfig(**fields))[0]) for fields in ({}, changed))  # type: ignore[arg-type]
    assert any(not np.array_equal(base[name], other[name]) for name in base)


def test_the_total_difference_ends_the_steps() -> None:
    short, whole = (
        weights_of(equalized(net(), CLEConfig(cle_steps=-1, cle_total_layer_diff_threshold=limit))[0])
        for limit in (1e9, 1.9e-7)
    )
    once = weights_of(equalized(net())[0])
    assert all(np.array_equal(short[name], once[name]) for name in once)
    assert any(not np.array_equal(whole[name], once[name]) for name in once)
