"""An algorithm is one function for both flows: the change drill with GPTQ as a textbook has it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tests.onnx_flow import models
from tests.torch_flow.export.networks import IDS, llama, logits
from torch import nn

import quark
import quark.onnx as q
from quark.algorithms.names import ROWS
from quark.algorithms.own import OWN, own_algorithm
from quark.cli import main
from quark.errors import ConfigError
from quark.onnx.quantization.config.algorithm import ALGO_NAME_TO_CLASS
from quark.onnx.quantization.config.tuners import with_tuners
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.config.algorithms import AlgoConfig
from quark.torch.quantization.config.config import GPTQConfig, QConfig, QLayerConfig, QTensorConfig
from quark.torch.quantization.config.type import Dtype

RNG = np.random.default_rng(5)
MIX = RNG.normal(size=(24, 24))
X = (RNG.normal(size=(64, 24)) @ MIX).astype(np.float32)
W = RNG.normal(size=(24, 12)).astype(np.float32)


def textbook(weight: np.ndarray, hessian: np.ndarray, grid: Any, damp: float = 0.01) -> np.ndarray:
    """Column by column, the error of each spread over the columns that follow (Frantar et al. 2022, algorithm 1)."""
    damped = hessian.astype(np.float64) + damp * np.mean(np.diag(hessian)) * np.eye(len(hessian))
    inverse = np.linalg.cholesky(np.linalg.inv(damped)).T
    rest, made = weight.astype(np.float64), np.zeros_like(weight)
    for i in range(weight.shape[1]):
        made[:, i] = grid.take(np.array([i])).round(rest[:, i : i + 1].astype(np.float32))[:, 0]
        rest[:, i + 1 :] -= np.outer((rest[:, i] - made[:, i]) / inverse[i, i], inverse[i, i + 1 :])
    return made


@pytest.fixture
def registered() -> Iterator[Any]:
    yield quark.register_algorithm("textbook", textbook)
    quark.unregister_algorithm("textbook")


# ---- ONNX ------------------------------------------------------------------------------------------------------------


def onnx_answers(algorithms: list[Any]) -> np.ndarray:
    """What a model with a quantized weight computes."""
    proto = models.model("net (float[N, 24] x) => (float[N, 12] y) { y = MatMul (x, w) }", {"w": W})
    layer = q.QLayerConfig(input_tensors=q.Int16Spec(), weight=q.Int4Spec())
    config = q.QConfig(layer, algo_config=algorithms, extra_options={"PrintSummary": False})
    made = q.ModelQuantizer(config).quantize_model(proto, None, [{"x": X[:32]}, {"x": X[32:]}])
    assert made is not None
    return models.run(made, {"x": X})[0]


def test_an_algorithm_behind_one_that_rounds_says_that_nothing_is_left(
    registered: Any, caplog: pytest.LogCaptureFixture
) -> None:
    proto = models.model("net (float[N, 24] x) => (float[N, 12] y) { y = MatMul (x, w) }", {"w": W})
    layer = q.QLayerConfig(input_tensors=q.Int16Spec(), weight=q.Int4Spec())
    config = q.QConfig(layer, algo_config=[registered.onnx(), q.GPTQConfig()], extra_options={"PrintSummary": False})
    passes = {one.name: one for one in q.ModelQuantizer(config).run(proto, None, [{"x": X}]).passes}
    assert (passes["textbook"].fired, passes["textbook"].refused, passes["gptq"].fired) == (1, (), 0)
    (said,) = passes["gptq"].refused
    assert said.startswith("no better than what they have on the calibration data: ")
    for second, words in ((GPTQConfig(), "gptq changes no weight"), (None, "")):
        caplog.clear()
        weight = QTensorConfig(Dtype.int4, qscheme="per_channel", ch_axis=0)
        own = [registered.torch(), *([] if second is None else [second])]
        made = QConfig(QLayerConfig(weight=weight), algo_config=own)
        ModelQuantizer(made).quantize_model(nn.Sequential(nn.Linear(24, 12)), [torch.from_numpy(X)])
        assert (words in caplog.text) if words else "changes no weight" not in caplog.text


def test_what_the_function_raises_is_one_sentence_with_its_line() -> None:
    def fails(weight: np.ndarray, hessian: np.ndarray, grid: Any) -> np.ndarray:
        return np.zeros(len(weight)).reshape(7, 3)

    row = own_algorithm("failing", fails)
    with pytest.raises(ConfigError, match=r"'failing' raised ValueError in line \d+ of test_own_algorithm.py: cannot"):
        row.rounded(W, W, None, {})  # type: ignore[arg-type]


def lost(answers: np.ndarray) -> float:
    return float(np.square(answers - X @ W).mean())


def test_onnx_rounds_by_the_function_and_comes_to_what_gptq_comes_to(registered: Any) -> None:
    nearest, own, gptq = (onnx_answers(algos) for algos in ([], [registered.onnx()], [q.GPTQConfig()]))
    assert lost(own) < 0.7 * lost(nearest)
    assert lost(own) == pytest.approx(lost(gptq), rel=0.05)


def test_settings_reach_the_function_and_a_worse_result_is_not_used(registered: Any) -> None:
    seen: list[float] = []

    def spoilt(weight: np.ndarray, hessian: np.ndarray, grid: Any, factor: float = 1.0) -> np.ndarray:
        seen.append(factor)
        return -factor * weight

    worse = quark.register_algorithm("spoilt", spoilt)
    try:
        assert (onnx_answers([worse.onnx({"factor": 2.0})]) == onnx_answers([])).all()
        with pytest.raises(ConfigError, match=r"field of spoilt 'factr'.*Did you mean 'factor'"):
            worse.onnx({"factr": 2.0})
    finally:
        quark.unregister_algorithm("spoilt")
    assert seen == [2.0]


# ---- torch -----------------------------------------------------------------------------------------------------------


def torch_model() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 12))
    return model.eval()


WEIGHT = QTensorConfig(Dtype.int4, qscheme="per_channel", ch_axis=0)


def torch_quantized(algorithms: list[Any]) -> nn.Module:
    config = QConfig(QLayerConfig(weight=WEIGHT), algo_config=algorithms)
    return ModelQuantizer(config).quantize_model(torch_model(), [torch.from_numpy(X[:32]), torch.from_numpy(X[32:])])


def error(model: nn.Module) -> float:
    with torch.no_grad():
        return float((model(torch.from_numpy(X)) - torch_model()(torch.from_numpy(X))).square().mean())


def test_torch_rounds_by_the_same_function_exports_and_reloads(registered: Any, tmp_path: Path) -> None:
    nearest, own = torch_quantized([]), torch_quantized([registered.torch()])
    gptq = torch_quantized([GPTQConfig(damp_percent=0.01, desc_act=False, static_groups=True)])
    assert error(own) < 0.7 * error(nearest)
    assert error(own) == pytest.approx(error(gptq), rel=0.05)
    export_safetensors(own, tmp_path / "out")
    again = import_model_from_safetensors(torch_model(), tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(again(torch.from_numpy(X)), own(torch.from_numpy(X)))


def test_a_name_is_taken_once_and_gone_after(registered: Any) -> None:
    assert AlgoConfig.from_dict({"name": "textbook", "damp": 0.1}).damp == 0.1
    for name in ("textbook", "gptq", "autoround"):
        with pytest.raises(ConfigError, match="exists already"):
            quark.register_algorithm(name, textbook)
    with pytest.raises(ConfigError, match="was not registered"):
        quark.unregister_algorithm("gptq")
    with pytest.raises(ConfigError, match="identifier"):
        quark.register_algorithm("my algorithm", textbook)
    with pytest.raises(ConfigError, match="function"):
        quark.register_algorithm("number", 5)
    with pytest.raises(ConfigError, match="'strength' needs a default"):
        quark.register_algorithm("bare", lambda weight, hessian, grid, strength: weight)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda weight: weight.T, r"must return floats of the shape \(12, 24\), not float32 of \(24, 12\)"),
        (lambda weight: weight.astype(np.int32), "not int32"),
        (lambda weight: weight * np.nan, "not finite"),
    ],
)
def test_what_a_function_returns_wrongly_is_named(returned: Any, words: str) -> None:
    made = quark.register_algorithm("wrong", lambda weight, hessian, grid: returned(weight))
    try:
        with pytest.raises(ConfigError, match=words):
            onnx_answers([made.onnx()])
    finally:
        quark.unregister_algorithm("wrong")


# ---- names and settings ----------------------------------------------------------------------------------------------

TAKEN = ("SmoothQuant", "smooth", "smooth_quant", "GPTQ", "awq", "ce", "bc", "quarot", "rotation", "svd_quant", "hqq")
TAKEN += ("AutoSmoothQuant", "Auto_MixPrecision", "calibration_search", "TextBook")


@pytest.mark.parametrize("name", TAKEN)
def test_names_of_either_flow_are_taken_before_torch_is_there(registered: Any, name: str) -> None:
    code = (
        "import quark, sys\n"
        "def nearest(weight, hessian, grid): return weight\n"
        "quark.register_algorithm('textbook', nearest)\n"
        "try: quark.register_algorithm(sys.argv[1], nearest)\n"
        "except quark.errors.ConfigError as error: print(error, 'torch' in sys.modules)\n"
    )
    with pytest.raises(ConfigError, match=f"'{name}' exists already: choose another name"):
        quark.register_algorithm(name, textbook)
    if name == "AutoSmoothQuant":  # of torch alone
        said = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True).stdout
        assert said == "the algorithm 'AutoSmoothQuant' exists already: choose another name False\n"


def test_every_name_of_either_flow_is_in_the_table() -> None:
    assert {row.onnx for row in ROWS} - {""} == set(ALGO_NAME_TO_CLASS) - set(OWN)
    registry = {name for name, kind in AlgoConfig.registry.items() if kind.__module__.startswith("quark.")}
    assert {row.torch for row in ROWS} - {""} == registry - set(OWN) - {""}


def typed(weight: np.ndarray, hessian: np.ndarray, grid: Any, n: int = 1, x: float = 0.5, t: str = "a", b: bool = True):  # type: ignore[no-untyped-def]
    return weight


WRONG = [
    ("n", 1.5, "an integer"),
    ("n", True, "an integer"),
    ("n", "1", "an integer"),
    ("x", "0.5", "a finite number"),
    ("x", float("nan"), "a finite number"),
    ("x", float("inf"), "a finite number"),
    ("x", False, "a finite number"),
    ("x", None, "a finite number"),
    ("t", 3, "text"),
    ("b", 1, "True or False"),
    ("b", "yes", "True or False"),
]


@pytest.fixture
def settled() -> Iterator[Any]:
    yield quark.register_algorithm("typed", typed)
    quark.unregister_algorithm("typed")


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG)
@pytest.mark.parametrize("flow", ["onnx", "torch"])
def test_settings_of_another_type_are_refused_in_either_flow(
    settled: Any, flow: str, name: str, value: Any, allowed: str
) -> None:
    said = re.escape(f"typed: {name}={value!r} must be {allowed}")
    with pytest.raises(ConfigError, match=f"^{said}$"):
        getattr(settled, flow)({name: value})
    assert getattr(settled, flow)({"x": 2, "n": 3, "t": "", "b": False}).x == 2


def test_a_function_that_cannot_be_called_so_is_refused() -> None:
    for function, words in ((lambda weight: weight, "must take"), (dict, "function of Python")):
        with pytest.raises(ConfigError, match=words):
            quark.register_algorithm("other", function)


def test_a_model_without_linear_layers_is_refused_in_torch(registered: Any) -> None:
    """Its weights would be rounded to nearest, as without the algorithm."""
    for own in (registered.torch(), GPTQConfig()):
        quantizer = ModelQuantizer(QConfig(QLayerConfig(weight=WEIGHT), algo_config=[own]))
        with pytest.raises(ConfigError, match=f"{own.name!r} rounds weights of linear layers, .* '0' is a Conv2d"):
            quantizer.check(nn.Sequential(nn.Conv2d(2, 2, 3)))
        quantizer.check(nn.Sequential(nn.Conv2d(2, 2, 3), nn.Linear(2, 2)))


# ---- the values themselves, by a formula of the test -----------------------------------------------------------------


@dataclass(frozen=True)
class Codes:
    """Symmetric codes from ``low`` to ``high`` under a step for every value: a grid that is not this package's."""

    step: np.ndarray
    low: int
    high: int

    def round(self, x: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(x / self.step), self.low, self.high) * self.step

    def take(self, columns: np.ndarray) -> Codes:
        return Codes(self.step[:, columns], self.low, self.high)


def better_rows(weight: np.ndarray, x: np.ndarray, grid: Codes) -> np.ndarray:
    """Rows [out, in] by the textbook where they lose less than rounded to nearest."""
    rows = textbook(weight, x.T @ x, grid), grid.round(weight)
    first, second = (np.square((row - weight) @ x.T).sum(1) for row in rows)
    return np.where((first < second)[:, None], *rows)


def test_torch_writes_the_values_of_the_formula(registered: Any) -> None:
    weight = W.T.copy()
    layer = nn.Linear(24, 12, bias=False)
    layer.weight.data = torch.from_numpy(weight.copy())
    config = QConfig(QLayerConfig(weight=WEIGHT), algo_config=[registered.torch()])
    made = ModelQuantizer(config).quantize_model(nn.Sequential(layer), [torch.from_numpy(X)])
    with torch.no_grad():
        found = made(torch.eye(24)).numpy().T
    step = np.repeat(np.abs(weight).max(1, keepdims=True) / np.float32(7.5), 24, 1)
    np.testing.assert_allclose(found, better_rows(weight, X, Codes(step, -8, 7)), rtol=1e-5, atol=1e-6)


WIDE = (RNG.normal(size=(600, 32)) @ RNG.normal(size=(32, 32))).astype(np.float32)  # 16 rows per input and more
WEIGHT_32 = RNG.normal(size=(32, 12)).astype(np.float32)


def in_few_bits(algorithms: list[Any], method: str = "GPTQ") -> onnx.ModelProto:
    proto = models.model("net (float[N, 32] x) => (float[N, 12] y) { y = MatMul (x, w) }", {"w": WEIGHT_32})
    few = {"UseMatMulNBits": True, "MatMulNBitsParams": {"Algorithm": method, "GroupSize": 16}, "PrintSummary": False}
    config = q.QConfig(q.QLayerConfig(q.Int16Spec(), q.Int4Spec()), algo_config=algorithms, extra_options=few)
    made = q.ModelQuantizer(config).quantize_model(proto, None, [{"x": WIDE}])
    assert made is not None
    assert [node.op_type for node in made.graph.node] == ["MatMulNBits"]
    return made


def test_matmulnbits_holds_the_values_of_the_formula(registered: Any) -> None:
    made = in_few_bits([registered.onnx()])
    found = models.run(made, {"x": np.eye(32, dtype=np.float32)})[0].T
    stored = {one.name: onnx.numpy_helper.to_array(one) for one in made.graph.initializer}
    scales = stored[made.graph.node[0].input[2]].reshape(12, 2)
    grid = Codes(np.repeat(scales, 16, 1), -8, 7)
    np.testing.assert_allclose(found, textbook(WEIGHT_32.T, WIDE.T @ WIDE, grid), rtol=1e-4, atol=1e-5)
    assert (found != grid.round(WEIGHT_32.T)).any()


def test_matmulnbits_says_what_goes_with_it(registered: Any) -> None:
    with pytest.raises(ConfigError, match="textbook has no part in MatMulNBitsParams with Algorithm 'DEFAULT'"):
        in_few_bits([registered.onnx()], "DEFAULT")
    with pytest.raises(ConfigError, match="textbook, GPTQConfig would round the same weights"):
        in_few_bits([registered.onnx(), q.GPTQConfig()])
    with pytest.raises(
        ConfigError, match=r"AdaRoundConfig cannot tune.*GPTQConfig, GPTAQConfig, QronosConfig, textbook"
    ):
        in_few_bits([q.AdaRoundConfig()])


# ---- the command line ------------------------------------------------------------------------------------------------

FILE = """
import numpy as np

def by_file(weight, hessian, grid, damp: float = 0.01):
    damped = hessian.astype(np.float64) + damp * np.mean(np.diag(hessian)) * np.eye(len(hessian))
    inverse = np.linalg.cholesky(np.linalg.inv(damped)).T
    rest, made = weight.astype(np.float64), np.zeros_like(weight)
    for i in range(weight.shape[1]):
        made[:, i] = grid.take(np.array([i])).round(rest[:, i : i + 1].astype(np.float32))[:, 0]
        rest[:, i + 1 :] -= np.outer((rest[:, i] - made[:, i]) / inverse[i, i], inverse[i, i + 1 :])
    return made

def fails(weight, hessian, grid):
    raise IndexError("seven")

def gptq(weight, hessian, grid):
    return weight
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "mine.py").write_text(FILE)
    proto = models.model("net (float[N, 24] x) => (float[N, 12] y) { y = MatMul (x, w) }", {"w": W})
    onnx.save(proto, tmp_path / "float.onnx")
    np.savez(tmp_path / "x.npz", x=X)
    yield tmp_path
    for name in [*OWN]:
        quark.unregister_algorithm(name)


def typed_command(folder: Path, *algorithms: str) -> list[str]:
    words = ["onnx", "quantize", str(folder / "float.onnx"), "-o", str(folder / "out.onnx"), "--data"]
    words += [str(folder / "x.npz"), "-p", "A16W8", "--overwrite"]
    return [*words, *(word for text in algorithms for word in ("-a", text))]


def test_the_command_line_takes_a_function_from_a_file(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(folder)
    answers = []
    for algorithm in ((), ("mine.py:by_file",), ("mine.py:by_file:damp=0.01",), ("gptq:perc_damp=0.01",)):
        assert main(typed_command(folder, *algorithm)) == 0
        answers.append(models.run(onnx.load(folder / "out.onnx"), {"x": X})[0])
    nearest, own, told, gptq = map(lost, answers)
    assert own == told < 0.9 * nearest
    assert own == pytest.approx(gptq, rel=0.05)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mine.py:none", "has no function 'none'"),
        ("no.py:by_file", "the file 'no.py' does not exist"),
        ("mine.py:gptq", "'gptq' exists already: choose another name"),
        ("mine.py:fails", "--algorithm 'mine.py:fails' raised IndexError in line 14 of mine.py: seven"),
        ("mine.py:by_file:damp=high", "by_file: damp='high' must be a finite number"),
        ("mine.py:by_file:dmp=1", "Did you mean 'damp'"),
    ],
)
def test_what_a_file_does_wrongly_is_a_sentence(
    folder: Path, monkeypatch: Any, capsys: Any, text: str, words: str
) -> None:
    monkeypatch.chdir(folder)
    assert main(typed_command(folder, text)) == 1
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (folder / "out.onnx").exists()


def test_the_output_is_not_the_file_of_the_function(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(folder)
    words = [*typed_command(folder)[:4], "mine.py", "-a", "mine.py:by_file:damp=0.1", "--overwrite"]
    assert main(words) == 1
    assert "--algorithm" in capsys.readouterr().err
    assert (folder / "mine.py").read_text() == FILE


def test_a_candidate_for_single_layers_takes_the_name(registered: Any) -> None:
    (found,) = with_tuners([], {"layer": "uint8/int4+textbook"})
    assert found == registered.onnx({"layers": ("layer",)})
    with pytest.raises(ConfigError, match=r"textbok.*Did you mean 'textbook'"):
        with_tuners([], {"layer": "uint8/int4+textbok"})


def test_the_torch_commands_take_it_too(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(folder)
    model = llama()
    model.save_pretrained("model")
    np.savez("ids.npz", input_ids=IDS.numpy())
    options = ["-s", "int4_wo_32", "--data", "ids.npz", "--seq-len", "8", "--no-check"]
    assert main(["torch", "quantize", "model", "-o", "none", "-s", "int4_wo_32", "-a", "mine.py:by_file"]) == 1
    assert "the algorithm 'by_file' needs samples" in capsys.readouterr().err
    found = {}
    for name, command, more in (
        ("nearest", "quantize", []),
        ("memory", "quantize", ["-a", "mine.py:by_file"]),
        ("files", "quantize-files", ["-a", "mine.py:by_file"]),
    ):
        words = [word for word in options if command == "quantize" or word != "--no-check"]
        assert main(["torch", command, "model", "-o", name, *words, *more]) == 0
        found[name] = logits(import_model_from_safetensors(llama(), name))
    reference = logits(model)
    lost_by = {name: float((one - reference).square().mean()) for name, one in found.items()}
    assert lost_by["memory"] < lost_by["nearest"]
    assert torch.equal(found["memory"], found["files"])
    assert main(["torch", "plan", "model", "-s", "int4_wo_32", "-a", "mine.py:by_file"]) == 0
    assert "needs samples" in capsys.readouterr().err
