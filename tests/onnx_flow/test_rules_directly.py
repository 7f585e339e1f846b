"""Rules of the NPU and of selections asked directly, with positions and nodes that models seldom have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.onnx_flow import models

from quark.onnx.graph.model import load
from quark.onnx.npu import rules
from quark.onnx.qdq import place, selection


def test_one_position_of_a_bias_fits_the_channel_with_the_least() -> None:
    """Weights per channel and a bias with one position: a shift that leaves the accumulator for none of them."""
    node = load(
        models.model(
            "g (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y) { y = Conv (x, w, b) }",
            {"w": models.normal(2, 2, 1, 1), "b": models.normal(2)},
            17,
        )
    ).graph[0]
    positions = {"x": np.array(5), "w": np.array([3, 30]), "b": np.array(6), "y": np.array(4)}

    def read(of: Any, slot: int, channels: bool) -> str:
        return ("x", "w", "b")[slot]

    at: Any = SimpleNamespace(read=read, written=lambda of: "y", of=positions.get)
    ((name, moved),) = rules.shift_bias(node, at)
    # accumulators at 8 and 35: shifts of 2 and 29, of which a shifter has at most 15, leave the bias at 6 and 20
    assert name == "b" and int(moved) == 6


@pytest.mark.parametrize(
    ("body", "reads"),
    [
        ("y = Add (x, w)", [True]),
        ("y = Add (w, x)", [True]),
        ("a = Relu (x) y = Add (a, w)", [True, False]),
        ("a = Relu (x) y = Add (a, x)", [True, True]),
        ("y = Add (w, w)", [False]),
    ],
)
def test_nodes_that_read_an_input_of_the_model(body: str, reads: list[bool]) -> None:
    text = f"g (float[2] x) => (float[2] y) {{ {body} }}"
    nodes = load(models.model(text, {"w": models.normal(2)} if "w" in body else {}, 17)).graph
    assert [selection._info(node).reads_graph_input for node in nodes] == reads


@pytest.mark.parametrize(("kind", "beside"), [("LSTM", True), ("Tanh", False)])
def test_recurrent_layers_are_quantized_beside_what_is_measured(
    kind: str, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "y = LSTM<hidden_size = 3> (a, w, r)" if kind == "LSTM" else "y = Tanh (a)"
    text = f"g (float[4, 1, 2] x) => (float[?] y) {{ a = Relu (x) {body} }}".replace(
        "?", "N, M, K, L"[: 10 if beside else 7]
    )
    weights = {"w": models.normal(1, 12, 2), "r": models.normal(1, 12, 3)} if beside else {}
    placement: Any = SimpleNamespace(model=load(models.model(text, weights, 17)))
    placement.job = SimpleNamespace(options=SimpleNamespace(TunedFloat=None, FloatWhereFaster=True))
    seen: list[bool] = []

    def measured(model: Any, nodes: Any, asked: Any, beside: bool) -> set[Any]:
        seen.append(beside)
        return set()

    monkeypatch.setattr(place, "_suits_cpu", lambda job, option: True)
    monkeypatch.setattr(place.slower, "faster_in_float", measured)
    place._leave_slower(dict.fromkeys(placement.model.graph), placement)
    assert seen == [beside]
