"""Exported files are opened in a default session of ONNX Runtime and run before they appear."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quark.errors import ModelError
from quark.torch import ModelQuantizer, export_onnx
from quark.torch.export.onnx_decoder import Traced
from quark.torch.export.onnx_run import answers_of, run_exported
from quark.torch.quantization.config.config import (
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    QConfig,
    QLayerConfig,
    Uint8PerTensorSpec,
)

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")  # torch's exporter needs it
pytestmark = pytest.mark.filterwarnings("ignore")
WEIGHT = Int8PerChannelSpec(0, symmetric=True).to_quantization_spec()
INPUTS = {
    "symmetric": Int8PerTensorSpec(symmetric=True),
    "asymmetric": Int8PerTensorSpec(symmetric=False),
    "unsigned": Uint8PerTensorSpec(),
}


class Net(nn.Module):
    """Linear layers around what ONNX Runtime moves a DequantizeLinear past: one output for each way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.ModuleList(nn.Linear(16, 16) for _ in range(6)), nn.LayerNorm(16)
        self.second = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        plain, rows, turned, mixed, normed, kept = (layer(x) for layer in self.first)
        heads = mixed.reshape(*x.shape[:2], 4, 4).transpose(1, 2)
        heads = F.softmax(heads @ heads.transpose(-1, -2), -1).matmul(heads).transpose(1, 2).reshape(x.shape)
        a, b, c, d, e, f = self.second
        return (
            a(plain), b(rows.reshape(-1, 16)).reshape(x.shape), c(turned.transpose(0, 1)).transpose(0, 1) + x, d(heads),
            e(F.gelu(self.norm(normed) + x)), f(kept.squeeze(1)),
        )  # fmt: skip


def made(inputs: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    data = [torch.randn(2, 5, 16) * 2 + 0.5 for _ in range(3)]
    config = QConfig(QLayerConfig(input_tensors=INPUTS[inputs].to_quantization_spec(), weight=WEIGHT))
    return ModelQuantizer(config).quantize_model(Net().eval(), data), data[0]


@pytest.mark.parametrize("inputs", INPUTS)
def test_int8_inputs_of_three_dimensions_open_in_a_default_session(inputs: str, tmp_path: Path) -> None:
    model, x = made(inputs)
    export_onnx(model, str(tmp_path / "out"), x)
    session = ort.InferenceSession(tmp_path / "out" / "quark_model.onnx")
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        for y, wanted in zip(
            found, model(x), strict=True
        ):  # one code in a thousand may fall to the other side of a tie
            assert float((torch.from_numpy(y) - wanted).norm() / wanted.norm()) < 5e-3


class Conditioned(nn.Module):
    """A mapping as an argument of its own, as diffusers have it, and one that a keyword is."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor | None = None, added: dict[str, Tensor] | None = None) -> Tensor:
        h = self.a(x) if scale is None else self.a(x) * scale
        return h if added is None else h + added["text"] * added["time"]


X, SCALE = torch.linspace(-1, 1, 16).reshape(2, 8), torch.tensor(3.0)
ADDED = {"text": torch.linspace(0, 1, 8), "time": torch.full((2, 1), 0.5)}


@pytest.mark.parametrize(
    "arguments",
    [X, (X, SCALE, ADDED), (X, None, ADDED), (X, {"scale": SCALE}), {"x": X, "added": ADDED},
     (X, SCALE, {"added": ADDED})],
    ids=["tensor", "mapping last", "none between", "keyword", "keywords", "all"],
)  # fmt: skip
def test_arguments_are_positions_keywords_and_mappings(arguments: object, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = QConfig(QLayerConfig(weight=WEIGHT))
    model = ModelQuantizer(config).quantize_model(Conditioned().eval())
    export_onnx(model, str(tmp_path), arguments)
    flat = arguments if isinstance(arguments, tuple) else (arguments,)
    names = dict(zip(("x", "scale", "added"), flat, strict=False))
    if isinstance(flat[-1], dict) and flat[-1] is not ADDED:
        names = dict(zip(("x", "scale"), flat[:-1], strict=False)) | flat[-1]
    with torch.no_grad():
        wanted = model(**names)
    session = ort.InferenceSession(tmp_path / "quark_model.onnx")
    tensors = {"x": X, "scale": names.get("scale"), "text": ADDED["text"], "time": ADDED["time"]}
    feeds = {one.name: tensors[one.name.rpartition("_")[2]].numpy() for one in session.get_inputs()}
    np.testing.assert_allclose(session.run(None, feeds)[0], wanted, rtol=1e-5, atol=1e-5)


def graph(path: Path, factor: float, op: str = "Mul", domain: str = "") -> Path:
    made = onnx.helper.make_graph(
        [onnx.helper.make_node(op, ["x", "k"], ["y"], domain=domain)], "g",
        [onnx.helper.make_tensor_value_info("x", 1, [2, 8])], [onnx.helper.make_tensor_value_info("y", 1, None)],
        [onnx.numpy_helper.from_array(np.float32(factor) if op == "Mul" else np.int64([-1]), "k")],
    )  # fmt: skip
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("nowhere", 1)]
    onnx.save(onnx.helper.make_model(made, opset_imports=opsets, ir_version=10), path)
    return path


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("factor, told", [(2.0, False), (2.03, False), (2.05, True), (-2.0, True)])
def test_other_answers_are_told(factor: float, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    traced = Traced(Double(), (X,))
    with caplog.at_level(logging.WARNING):
        run_exported(graph(tmp_path / "m.onnx", factor), traced, answers_of(traced))
    assert ("apart from the model" in caplog.text) == told


@pytest.mark.parametrize(
    "change, message",
    [({"factor": np.nan}, "nan or inf"), ({"factor": 1, "op": "Reshape"}, "it answers"),
     ({"factor": 2, "domain": "nowhere"}, "ONNX Runtime does not run it: .*nowhere")],
)  # fmt: skip
def test_files_that_do_not_answer_are_refused(change: dict, message: str, tmp_path: Path) -> None:
    traced = Traced(Double(), (X,))
    with pytest.raises(ModelError, match=message):
        run_exported(graph(tmp_path / "m.onnx", **change), traced, answers_of(traced))


def test_where_the_model_has_no_numbers_the_file_may_have_none(tmp_path: Path) -> None:
    broken = Traced(Double(), (torch.full((2, 8), torch.inf),))
    run_exported(graph(tmp_path / "m.onnx", 2.0), broken, answers_of(broken))


def test_a_refused_file_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelQuantizer(QConfig(QLayerConfig(weight=WEIGHT))).quantize_model(Conditioned().eval())
    monkeypatch.setattr("quark.torch.export.onnx_model.answers_of", lambda traced: [torch.zeros(1)])
    with pytest.raises(ModelError, match="it answers"):
        export_onnx(model, str(tmp_path / "out"), X)
    assert list(tmp_path.iterdir()) == []
    export_onnx(model, str(tmp_path / "out"), X, verify=False)
