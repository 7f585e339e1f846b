"""Sensitivity and search on small ONNX models: a planted layer is found, sizes are exact, a killed run goes on."""

from __future__ import annotations

import ast
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from tests.onnx_flow.models import branching, model, normal, session

from quark.cli import main
from quark.demo import data as demo
from quark.errors import ConfigError
from quark.ir.surgery import apart, let_go
from quark.measure.outputs import Outputs
from quark.observers import SEARCHES
from quark.onnx import AdaRoundConfig, Config, ModelQuantizer
from quark.onnx.compare import ENDS, compare
from quark.onnx.config_file import config_of, load_config
from quark.onnx.graph.model import load
from quark.onnx.quantization.config.candidates import candidate
from quark.onnx.quantization.config.tuners import preset_tuners
from quark.onnx.search import in_order, save_plan, search
from quark.onnx.sensitivity import sensitivity
from quark.search.target import SearchGoal
from quark.search.trials import Trying

LAYERS = 5
PLANTED = "conv3"  # reads a tensor with one channel 300 times the others


def chain() -> onnx.ModelProto:
    """Convolutions in a row; the weight of one has a channel 300 times the others, which the next undoes."""
    graph, weights, source = [], {}, "x"
    for k in range(LAYERS):
        weight = normal(8, 8, 3, 3, seed=k, scale=0.2)
        if f"conv{k + 1}" == PLANTED:
            weight[0] *= 300
        if f"conv{k}" == PLANTED:
            weight[:, 0] /= 300
        weights[f"w{k}"], weights[f"b{k}"] = weight, normal(8, seed=10 + k, scale=0.1)
        target = "y" if k == LAYERS - 1 else f"c{k}"
        graph.append(f"[conv{k}] {target} = Conv<pads=[1,1,1,1]>({source}, w{k}, b{k})")
        source = f"r{k}"
        if k < LAYERS - 1:
            graph.append(f"[relu{k}] r{k} = Relu(c{k})")
    text = "g (float[1,8,8,8] x) => (float[1,8,8,8] y) {\n" + "\n".join(graph) + "\n}"
    return model(text, weights)


def feeds(count: int = 3) -> list[dict[str, np.ndarray]]:
    return [{"x": normal(1, 8, 8, 8, seed=k)} for k in range(count)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("search") / "model.onnx"
    onnx.save(chain(), made)
    return made


def test_the_planted_layer_comes_first_and_the_float_one_loses_nothing(path: Path) -> None:
    found = sensitivity(path, "A8W8_CPU", feeds(), ["uint8/int8@channel", "float"])
    assert found.layers == [f"conv{k}" for k in range(LAYERS)]
    ranked = found.ranked("uint8/int8@channel")
    assert ranked[0].layer == PLANTED
    assert ranked[0].loss > 5 * ranked[1].loss > 0
    assert all(trial.loss == 0 and trial.metrics["sqnr"] == np.inf for trial in found.ranked("float"))


@pytest.mark.parametrize("name", ["uint8/int8", "uint8:percentile/int8"])
def test_a_trial_is_what_quantizing_only_that_layer_gives(path: Path, name: str) -> None:
    """The same numbers as from the public verb with everything else excluded, for the layer at the end."""
    import onnxruntime

    found = sensitivity(path, "A8W8_CPU", feeds(), [name])
    last = f"conv{LAYERS - 1}"
    config = config_of({"preset": "A8W8_CPU", "options": {"PrintSummary": False}, "layers": {last: name}})
    config.include_cle = False
    config.nodes_to_exclude = [f"conv{k}" for k in range(LAYERS - 1)] + [f"relu{k}" for k in range(LAYERS - 1)]
    made = ModelQuantizer(Config(config)).quantize_model(str(path), None, feeds())
    runs = [onnxruntime.InferenceSession(m.SerializeToString()) for m in (chain(), made)]
    pairs = [[session.run(None, feed)[0].astype(np.float64) for session in runs] for feed in feeds()]
    noise = sum(((x - y) ** 2).sum() for x, y in pairs) / sum((x**2).sum() for x, _ in pairs)
    trial = found.of(last, name)
    assert trial is not None and trial.loss == pytest.approx(noise, rel=0.05)


def test_every_calibration_method_is_a_candidate_behind_a_type_and_behind_a_preset() -> None:
    for method in SEARCHES:
        for name in (f"uint8:{method}/int8", f"A8W8:{method}"):
            spec = candidate(name)
            assert spec is not None and spec.inputs is not None and spec.inputs.method == method
            plain = candidate(name.replace(f":{method}", ""))
            assert plain is not None and spec == replace(plain, inputs=spec.inputs, outputs=spec.inputs)


def test_a_search_chooses_between_calibration_methods_and_its_file_says_which(path: Path, tmp_path: Path) -> None:
    """One value far outside costs every other one its precision, unless the range leaves it out."""
    rare, config = (
        [{"x": feed["x"].copy()} for feed in feeds(16)],
        {"preset": "A8W8_CPU", "options": {"Percentile": 98.0}},
    )
    for feed in rare:
        feed["x"][0, 0, 0, 0] = 4000.0
    names = ["uint8/int8@channel", "uint8:percentile/int8@channel"]
    study = sensitivity(path, config, rare, names)
    assert len({study.of("conv0", name).loss for name in names}) == 2  # type: ignore[union-attr]
    found = search(path, config, rare, names, SearchGoal(limit=1e9))
    save_plan(tmp_path / "plan.yaml", config, found, None, "size")
    made = ModelQuantizer(Config(load_config(tmp_path / "plan.yaml"))).run(str(path), tmp_path / "q.onnx", rare)
    methods = {tensor.name: tensor.spec.method for tensor in made.plan if tensor.role == "activation"}
    assert methods["x"] == ("percentile" if "percentile" in found.layers["conv0"] else "minmax")


def stored(proto: onnx.ModelProto, names: Mapping[str, str]) -> int:
    """Bytes of the initializers that weights and biases have become, from the file alone."""
    total = 0
    for tensor in proto.graph.initializer:
        if any(tensor.name == name or tensor.name.startswith(f"{name}_") for name in names):
            total += len(tensor.raw_data) or onnx.numpy_helper.to_array(tensor).nbytes
    return total


def test_a_found_plan_has_its_size_exactly_and_protects_the_planted_layer(path: Path, tmp_path: Path) -> None:
    kinds = ["uint8/int4", "uint8/int8@channel", "float"]
    found = search(path, "A8W8_CPU", feeds(), kinds, SearchGoal("sqnr>=16", compare=True))
    assert found.value >= 16 > 5 > found.uniform["uint8/int8@channel"][0]
    assert [layer for layer, name in found.layers.items() if name == "float"] == [PLANTED]
    assert "uint8/int4" in found.layers.values()
    assert found.costs["size"] < found.uniform["float"][1]["size"] / 2
    plan = tmp_path / "plan.yaml"
    save_plan(plan, "A8W8_CPU", found, "sqnr>=16", "size")
    assert list(load_config(plan).layers) == list(found.layers)
    config = load_config(plan)
    config.extra_options |= {"PrintSummary": False, "FasterForms": False}  # which store equal zero points once
    made = ModelQuantizer(Config(config)).quantize_model(str(path), None, feeds())
    names = {name: name for k in range(LAYERS) for name in (f"w{k}", f"b{k}")}
    assert stored(made, names) == found.costs["size"]
    formats = {layer: {"uint8/int4": onnx.TensorProto.INT4}.get(name) for layer, name in found.layers.items()}
    types = {tensor.name: tensor.data_type for tensor in made.graph.initializer}
    for layer, wanted in formats.items():
        if wanted is not None:
            assert types[f"w{layer[-1]}_quantized"] == wanted


def codes(made: onnx.ModelProto) -> dict[str, bytes]:
    return {t.name: t.SerializeToString() for t in made.graph.initializer if t.name.endswith("_quantized")}


def written(path: Path, values: dict[str, object]) -> onnx.ModelProto:
    config = config_of({"preset": "A8W8_CPU", "options": {"PrintSummary": False}, **values})
    return ModelQuantizer(Config(config)).quantize_model(str(path), None, feeds())


def test_a_plan_has_algorithms_per_layer(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two candidates that cost the same, the tuned one is taken, and the file says what was measured."""
    shorter: Any = replace(preset_tuners()["adaround"], num_iterations=100)  # a tenth: small layers need no more
    monkeypatch.setitem(preset_tuners(), "adaround", shorter)
    plain, tuned = "uint8/int4", "uint8/int4+adaround"
    study = sensitivity(path, "A8W8_CPU", feeds(), [plain, tuned])
    assert sum(study.of(layer, tuned).loss < 0.9 * study.of(layer, plain).loss for layer in study.layers) >= 3  # type: ignore[union-attr]
    found = search(
        path, "A8W8_CPU", feeds(), [plain, tuned, "float"], SearchGoal(budget="bits", limit=1e9, compare=True)
    )
    assert found.uniform[tuned][0] > found.uniform[plain][0]
    found = search(path, "A8W8_CPU", feeds(), [plain, tuned], SearchGoal(budget="size", limit=1e9))
    assert list(found.layers.values()).count(tuned) >= 3
    plan = tmp_path / "plan.yaml"
    save_plan(plan, "A8W8_CPU", found, None, "size")
    config = load_config(plan)
    [tuner] = [one for one in config.algorithms if isinstance(one, AdaRoundConfig)]
    assert set(tuner.layers) == {layer for layer, name in found.layers.items() if name == tuned}
    config.extra_options["PrintSummary"] = False
    made = ModelQuantizer(Config(config)).quantize_model(str(path), None, feeds())
    pairs = [[session(m).run(None, feed)[0].astype(np.float64) for m in (chain(), made)] for feed in feeds()]
    noise = sum(((x - y) ** 2).sum() for x, y in pairs) / sum((x**2).sum() for x, _ in pairs)
    assert -10 * np.log10(noise) == pytest.approx(found.value, abs=1e-6)


def test_only_the_layer_that_says_so_is_tuned(path: Path) -> None:
    whole = {"options": {"PrintSummary": False, "FloatWhereFaster": False}}
    plain = codes(written(path, {**whole, "layers": {"conv1": "uint8/int4", "conv3": "uint8/int4"}}))
    setup = {"name": "adaround", "num_iterations": 60, "keep_worse": True, "layers": ["conv0"]}
    layers = {"conv1": "uint8/int4+adaround", "conv3": "uint8/int4"}
    tuned = codes(written(path, {**whole, "algorithms": [setup], "layers": layers}))
    assert sorted(name for name in plain if plain[name] != tuned[name]) == ["w0_quantized", "w1_quantized"]
    own = {"name": "adaround", "num_iterations": 7, "layers": ["conv0"]}
    config = config_of({"preset": "A8W8_CPU", "algorithms": [own], "layers": {"conv1": "uint8/int4+adaround"}})
    assert config.algorithms == [AdaRoundConfig(num_iterations=7, layers=("conv0", "conv1"))]
    everywhere = config_of({"preset": "A8W8_ADAROUND", "layers": {"conv1": "uint8/int4+adaround"}})
    assert [one.layers for one in everywhere.algorithms] == [()]  # type: ignore[attr-defined]


def test_a_float_layer_reads_what_was_not_rounded(path: Path) -> None:
    layers = {f"conv{k}": "uint8/int8" for k in range(LAYERS)} | {"conv3": "float"}
    config = config_of({"preset": "A8W8_CPU", "options": {"PrintSummary": False}, "layers": in_order(layers)})
    made = ModelQuantizer(Config(config)).quantize_model(str(path), None, feeds())
    produced = {name: node for node in made.graph.node for name in node.output}
    conv = next(node for node in made.graph.node if node.name == "conv3")
    assert produced[conv.input[0]].op_type == "Relu"
    assert conv.input[1] == "w3"


def test_the_more_precise_layer_decides_about_a_shared_tensor() -> None:
    assert list(in_order({"a": "A16W8", "b": "float", "c": "uint8/int4", "d": "A8W8"})) == ["c", "d", "a", "b"]


def test_workers_change_nothing(path: Path) -> None:
    kinds = ["uint8/int4", "uint8/int8"]
    alone, shared = (sensitivity(path, "A8W8_CPU", feeds(2), kinds, trying=Trying(workers=n)) for n in (1, 2))
    assert [trial.loss for trial in alone.trials] == [trial.loss for trial in shared.trials]


def test_no_thread_parses_python(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing in two threads at once fails at random on Python 3.11 (cpython issue 106905), and numpy's formats have
    headers that are Python."""
    parse, elsewhere = ast.parse, []

    def watched(*args: object, **named: object) -> object:
        if threading.current_thread() is not threading.main_thread():
            elsewhere.append(args)
        return parse(*args, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(ast, "parse", watched)
    sensitivity(path, "A8W8_CPU", feeds(2), ["uint8/int4", "uint8/int8"], trying=Trying(workers=2))
    tuner = AdaRoundConfig(num_iterations=2, batch_size=1, mem_opt_level=2, num_workers=2)
    config = config_of({"preset": "A8W8_CPU", "options": {"PrintSummary": False}})
    config.algorithms = [tuner]
    ModelQuantizer(Config(config)).quantize_model(str(path), None, feeds())
    assert not elsewhere


def test_inputs_of_text_and_of_any_name_are_kept(tmp_path: Path) -> None:
    graph = """g (string[2,8] __metadata__, float[2,8] names) => (float[2,4] y) {
        f = ai.onnx.ml.LabelEncoder<keys_strings=["a","ü"], values_floats=[1.0,2.0]>(__metadata__)
        s = Add(f, names)
        [mm] y = MatMul(s, w)
    }"""
    made = model(graph, {"w": normal(8, 4)}, domains={"ai.onnx.ml": 2})
    onnx.save(made, tmp_path / "text.onnx")
    words = np.array([["a", "ü"] * 4] * 2, dtype=object)
    rows = [{"__metadata__": words, "names": normal(2, 8, seed=k)} for k in range(3)]
    study = sensitivity(tmp_path / "text.onnx", "A8W8_CPU", rows)
    assert "mm" in {trial.layer for trial in study.trials}
    assert all(25 < trial.metrics["sqnr"] < 60 for trial in study.trials)


def test_trials_beside_each_other_map_their_weights_by_themselves(path: Path, tmp_path: Path) -> None:
    """A thread must not see a tensor that another one is just mapping, or has unmapped."""
    onnx.save(onnx.load(path), tmp_path / "apart.onnx", save_as_external_data=True, size_threshold=0)
    source = load(tmp_path / "apart.onnx")
    made = [apart(source).graph.initializers for _ in range(2)]
    for name, value in source.graph.initializers.items():
        tensors = [value.const_value, *(one[name].const_value for one in made)]
        assert isinstance(tensors[0], ir.ExternalTensor) and len({id(one) for one in tensors}) == 3
        expected = tensors[1].numpy().copy()
        let_go(tensors[1])
        np.testing.assert_array_equal(tensors[2].numpy(), expected)


@pytest.mark.slow
def test_threads_that_take_turns_all_the_time_find_the_same(path: Path) -> None:
    kinds, before = ["uint8/int4", "uint8/int8", "float/int8"], sys.getswitchinterval()
    alone = sensitivity(path, "A8W8_CPU", feeds(1), kinds)
    try:
        sys.setswitchinterval(1e-6)
        for _ in range(25):
            shared = sensitivity(path, "A8W8_CPU", feeds(1), kinds, trying=Trying(workers=2))
            assert [trial.loss for trial in alone.trials] == [trial.loss for trial in shared.trials]
    finally:
        sys.setswitchinterval(before)


def test_a_function_of_the_users_ranks_and_is_a_target(path: Path, tmp_path: Path) -> None:
    code = "import onnx\ndef floats(path):\n    return sum(t.data_type == 1 and len(t.dims) == 4"
    (tmp_path / "task.py").write_text(f"{code} for t in onnx.load(path).graph.initializer)\n")
    task = f"{tmp_path / 'task.py'}:floats"
    found = sensitivity(path, "A8W8_CPU", feeds(2), ["uint8/int8"], task)
    assert {trial.loss for trial in found.trials} == {1.0}  # each trial takes one float weight away
    plan = search(path, "A8W8_CPU", feeds(2), ["uint8/int8", "float"], SearchGoal("floats>=2", metric=task))
    assert plan.value == 2 and list(plan.layers.values()).count("float") == 2
    missed = search(path, "A8W8_CPU", feeds(2), ["uint8/int8"], SearchGoal("floats>=2", metric=task))
    assert not missed.met and missed.value == 0 and missed.reported is None and "function" in missed.notes[0]
    (tmp_path / "task.py").write_text("floats = lambda path: float('nan')\n")
    with pytest.raises(ConfigError, match="the metric of the float model is nan, so nothing can be compared with it"):
        sensitivity(path, "A8W8_CPU", feeds(2), ["uint8/int8"], task)


KILLED = """
import os, signal, sys
from tests.onnx_flow.test_search import feeds
from quark.onnx.sensitivity import sensitivity
from quark.search.trials import Trying
def stop(done, total):
    if done == 4:
        os.kill(os.getpid(), signal.SIGKILL)
sensitivity(sys.argv[1], "A8W8_CPU", feeds(), ["uint8/int4", "uint8/int8"], trying=Trying(1, sys.argv[2], stop))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_a_killed_run_goes_on_and_ends_as_if_it_had_not_been(path: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    root = Path(__file__).parents[2]
    call = [sys.executable, "-c", KILLED, str(path), str(ledger)]
    assert subprocess.run(call, env=environment, cwd=root, capture_output=True).returncode == -signal.SIGKILL
    kept = json.loads(ledger.read_text())["values"]
    assert len(kept) == 4
    seen: list[int] = []
    kinds = ["uint8/int4", "uint8/int8"]
    again = sensitivity(
        path, "A8W8_CPU", feeds(), kinds, trying=Trying(ledger=ledger, progress=lambda done, total: seen.append(done))
    )
    assert seen == list(range(5, 2 * LAYERS + 1))
    assert again.trials == sensitivity(path, "A8W8_CPU", feeds(), kinds).trials
    with pytest.raises(ConfigError, match="another data"):
        sensitivity(path, "A8W8_CPU", feeds(2), kinds, trying=Trying(ledger=ledger))
    with pytest.raises(ConfigError, match="another Percentile"):
        values = {"preset": "A8W8_CPU", "options": {"Percentile": 99.0}}
        sensitivity(path, values, feeds(), kinds, trying=Trying(ledger=ledger))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("A8W9", "Did you mean 'A8W8'"),
        ("uint8/int44", "Did you mean 'int4'"),
        ("uint8/int4@wide", "unknown scales 'wide'"),
        ("uint8/mxfp4@32", "bring their own scales"),
        ("uint8:entropie/int8", "Did you mean 'entropy'"),
        ("float:mse/int8", "have no range"),
        ("MATMUL_NBITS", "in its own way"),
    ],
)
def test_candidates_that_cannot_be(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        candidate(name)
    assert words in str(error.value)


def test_algorithms_that_cannot_be_of_single_layers(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'uint8/int4\+adarond': unknown algorithm.*Did you mean 'adaround'"):
        sensitivity(path, "A8W8_CPU", feeds(1), ["uint8/int4+adarond"])
    with pytest.raises(ConfigError, match=r"layers: 'conv0'.*unknown algorithm 'cle'"):
        config_of({"preset": "A8W8_CPU", "layers": {"conv0": "uint8/int4+cle"}})


def test_other_mistakes_are_told_before_the_work(path: Path) -> None:
    start = time.perf_counter()
    for arguments, words in (
        ({"target": "sqnr>=9", "budget": "sise"}, "Did you mean 'size'"),
        ({}, "give a target such as 'sqnr>=30'"),
        ({"target": "sqnr>=9", "limit": 3.0}, "budget, not both"),
        ({"target": "perplexity<=9"}, "unknown metric"),
        ({"target": "f>=9", "metric": "none.py:f"}, "none.py:f"),
    ):
        with pytest.raises(ConfigError) as error:
            search(path, "A8W8_CPU", feeds(), ["uint8/int8"], SearchGoal(**arguments))
        assert words in str(error.value)
    with pytest.raises(ConfigError, match="mode 'dynamic'"):
        sensitivity(path, "UINT8_DYNAMIC_QUANT", feeds(), ["uint8/int8"])
    assert time.perf_counter() - start < 20


def test_latency_is_measured_per_layer_and_of_the_whole_plan(path: Path) -> None:
    found = search(path, "A8W8_CPU", feeds(2), ["uint8/int8@channel", "float"], SearchGoal(budget="latency", limit=1.0))
    assert set(found.layers.values()) == {"float"}
    assert all(trial.costs["latency"] > 0 for trial in found.study.trials)
    assert found.uniform["float"][1]["latency"] == found.costs["latency"] > 0


def test_what_is_reported_is_measured_on_samples_that_neither_calibrate_nor_choose(path: Path) -> None:
    """Eight samples: 0, 2, 4, 6 calibrate, 1 and 5 choose, 3 and 7 report; by the public verbs alone."""
    kinds, data = ["uint8/int8@channel", "float"], feeds(8)
    found = search(path, "A8W8_CPU", data, kinds, "sqnr>=16")
    assert found.met and found.study.samples == 4 and not found.notes
    config = config_of({"preset": "A8W8_CPU", "options": {"PrintSummary": False}, "layers": dict(found.layers)})
    made = ModelQuantizer(Config(config)).quantize_model(str(path), None, data[::2])
    for value, part in ((found.value, data[1::4]), (found.reported, data[3::4])):
        pairs = [[session(m).run(None, feed)[0].astype(np.float64) for m in (chain(), made)] for feed in part]
        noise = sum(((x - y) ** 2).sum() for x, y in pairs) / sum((x**2).sum() for x, _ in pairs)
        assert value == pytest.approx(-10 * np.log10(noise), abs=1e-6)
    few = search(path, "A8W8_CPU", feeds(2), kinds, SearchGoal("sqnr>=16", evaluation=data[:3]))
    assert few.study.samples == 2 and few.reported is not None and "hint" in few.notes[0]


def searched(path: Path, tmp_path: Path, *words: str) -> list[str]:
    np.savez(tmp_path / "samples.npz", x=np.concatenate([feed["x"] for feed in feeds(4)]))
    data = str(tmp_path / "samples.npz")
    plan = str(tmp_path / "plan.yaml")
    return ["onnx", "search", str(path), "-o", plan, "-p", "A8W8_CPU", "--data", data, "--no-compare", *words]


def test_a_search_ends_with_the_verdict_about_its_model_and_the_command_that_makes_it(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = searched(path, tmp_path, "--target", "sqnr>=12", "-c", "uint8/int4", "-c", "float", "--budget", "size")
    assert main(words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:10].strip() and line[9:10] == " "]
    subjects = ["result", "chosen by", "reported", "note", "accuracy", "speed", "size", "coverage", "next"]
    told = [line for line in lines if line[:10].strip() in subjects][-10:]
    assert [line[:10].strip() for line in told][:9] == subjects
    assert "4 samples, of which 1 decided nothing" in told[4] and "smaller" in told[6]
    asked = shlex.split(told[8][10:])
    assert asked[:3] == ["quark", "onnx", "quantize"] and main(asked[1:]) == 0
    made = Path(asked[asked.index("-o") + 1])
    accuracy = compare(path, made, feeds(4), ENDS).outputs["y"].sqnr
    assert accuracy == pytest.approx(float(told[4].split(" dB")[0].split()[-1]), abs=1.5)  # half the samples calibrate
    again = shlex.split(told[9].partition("not tried: ")[2])
    assert again[again.index("--target") + 1] == "sqnr>=22" and again[again.index("-c") + 1] == "uint8/int4"


@pytest.mark.slow
def test_a_search_and_quantize_say_the_same_of_a_classifier_whose_answers_few_samples_do_not_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four samples decide nothing, which are too few winners to count: decibels alone said another thing."""
    np.savez(tmp_path / "s.npz", image=demo.split()[0][0][:16])
    words = ["-p", "A8W8_CPU", "--data", str(tmp_path / "s.npz"), "-o", str(tmp_path / "plan.yaml"), "--json"]
    words += ["-c", "uint8/int4", "--target", "sqnr>=5", "--budget", "size"]
    assert main(["onnx", "search", str(demo.model_path()), *words]) == 0
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    asked = shlex.split(verdict["next"][0])
    asked[asked.index("-o") + 1] = str(tmp_path / "mixed.onnx")
    assert main([*asked[1:], "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["verdict"]["accuracy"]
    one, other = verdict["accuracy"], again
    assert one["word"] == other["word"] and all("top-1 answers" in found["reason"] for found in (one, other))


def test_a_search_fails_for_what_its_model_lacks_and_says_when_nothing_is_to_be_won(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = searched(path, tmp_path, "--target", "sqnr>=5", "-c", "uint8/int4", "-c", "float", "--json")
    assert main([*words, "--budget", "size", "--fail-under", "sqnr=90"]) == 3
    told = capsys.readouterr()
    verdict = json.loads(told.out)["verdict"]
    assert {"result", "accuracy", "speed", "size", "coverage", "next"} <= set(verdict)
    assert "--fail-under sqnr=90" in told.err and Path(tmp_path / "plan.yaml").is_file()
    words = searched(
        path, tmp_path, "--target", "sqnr>=200", "-c", "uint8/int4", "-c", "float", "--json", "--overwrite"
    )
    assert main([*words, "--budget", "size"]) == 0
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert "nothing to win" in verdict["speed"]["reason"] and "stay with the float model" in verdict["next"][0]


@pytest.mark.parametrize("order", [("good", "broken"), ("broken", "good")])
def test_an_output_that_is_not_a_number_is_the_worst(order: tuple[str, str]) -> None:
    """Wherever it stands: the other output alone would say that nothing is wrong."""
    made = Outputs()
    values = {"good": np.ones(4), "broken": np.full(4, np.nan)}
    made.update({name: np.ones(4) for name in order}, {name: values[name] for name in order}, kl=False)
    assert all(np.isnan(made.metrics()[name]) for name in ("sqnr", "cosine", "psnr", "mse"))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("side", ["float", "quantized", "both"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_infinite_output_loses_everything_or_is_a_mask(bad: float, side: str) -> None:
    """Masks of -inf in logits that both models have say nothing; anything else is the worst loss there is."""
    good = np.array([[0.5, 1.0, -2.0, 4.0]])
    spoilt = np.array([[bad, 1.0, -2.0, 4.0]])
    made = Outputs()
    made.update({"y": spoilt if side != "quantized" else good}, {"y": spoilt if side != "float" else good}, kl=True)
    found = made.metrics()
    masked = side == "both" and not np.isnan(bad)
    assert (found["noise"] == 0 and found["sqnr"] == np.inf) if masked else found["noise"] == np.inf
    assert masked or not found["sqnr"] > -np.inf
    if side == "both" and bad == -np.inf:
        assert found["kl"] == 0
    elif (side, bad) == ("float", -np.inf):  # the quantized model spreads over one class more: p log(p / q) by hand
        p, q = (np.exp(x[0, 1:]) / np.exp(x[0]).sum() for x in (spoilt, good))
        assert found["kl"] == pytest.approx(float(np.sum(p * np.log(p / q))))
    else:
        assert not found["kl"] < np.inf


@pytest.fixture
def branched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A search on a model whose layers are in the bodies of an If, but for what it is to make small."""
    monkeypatch.chdir(tmp_path)
    onnx.save(branching(), "model.onnx")
    np.savez("samples.npz", x=np.stack([normal(2, 4, seed=k) for k in range(4)]), flag=np.array([True, False] * 2))
    wanted = ["--ledger", "l.json", "--target", "sqnr>=5"]
    return ["onnx", "search", "model.onnx", "-o", "plan.yaml", "--data", "samples.npz", *wanted]


@pytest.mark.parametrize("preset", ["A8W8_CPU", "A8W8"])
def test_a_search_whose_budget_nobody_names_works_on_bodies_too(
    branched: list[str], preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*branched, "-p", preset, "-c", preset, "-c", "float"]) in (0, 3)
    assert "--budget latency" not in capsys.readouterr().out, "what is refused is not advised"


@pytest.mark.parametrize("budget", ["latency", "table.yaml"])
def test_a_budget_that_bodies_have_no_figures_for_is_refused_before_a_layer_is_tried(
    branched: list[str], budget: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("table.yaml").write_text("uint8/int8: 0.2\nfloat/float: 1.0\n")
    assert main([*branched, "-p", "A8W8_CPU", "-c", "uint8/int8", "-c", "float", "--budget", budget]) == 1
    assert "use --budget size" in capsys.readouterr().err
    assert not Path("l.json").exists() or "trial" not in Path("l.json").read_text()
