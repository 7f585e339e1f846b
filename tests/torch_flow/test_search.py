"""Sensitivity and search of the torch flow: skipping changes nothing, a planted layer, exact sizes, a killed run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from safetensors import safe_open
from tests.onnx_flow import models as onnx_models
from torch import nn

import quark
from quark.cli import main
from quark.cli.search_tables import layer_table
from quark.errors import ConfigError
from quark.numerics.formats import Block
from quark.observers import SEARCHES
from quark.onnx.sensitivity import sensitivity as onnx_sensitivity
from quark.search.target import SearchGoal
from quark.search.trials import Trying
from quark.torch import ModelQuantizer
from quark.torch.config.algorithms import AlgoConfig, GPTQConfig
from quark.torch.config.model import QConfig
from quark.torch.config.schemes import NAMES, base_name, scheme
from quark.torch.config.tensor import QTensorConfig
from quark.torch.config_file import check_candidate, read_values
from quark.torch.export.api import export_gguf
from quark.torch.from_values import config_of
from quark.torch.layer_runs import lay_out, measure, open_runs, traffic_of
from quark.torch.search import ASKED, save_plan, search, types_of
from quark.torch.sensitivity import TorchSearchGoal, sensitivity

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
PLANTED = "model.layers.1.mlp.down_proj"


def llama() -> nn.Module:
    """A small random Llama; one layer has a few weights that spoil its groups, and reads zeros there."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=48, **SIZES, initializer_range=0.2, attention_dropout=0.0)
    model = transformers.LlamaForCausalLM(config).eval()
    mlp = model.model.layers[1].mlp
    with torch.no_grad():
        mlp.up_proj.weight[::8] = 0
        mlp.down_proj.weight[:, ::8] = 20.0
    return model


def samples(count: int = 2) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, 48, (1, 24), generator=generator)} for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("torch-search")
    llama().save_pretrained(made / "model")
    np.save(made / "ids.npy", np.stack([one["input_ids"][0].numpy() for one in samples(4)]))
    return made


def test_skipping_blocks_changes_no_bit(tmp_path: Path) -> None:
    model = llama()
    common = lay_out(model, samples(), tmp_path)
    runs = open_runs(model, config_of({"scheme": "int4_wo_32"}, model), common)
    assert len(runs.blocks) == 3
    there = (PLANTED, "model.layers.0.self_attn.q_proj", "model.layers.2.mlp.up_proj")
    for name in (*there, "model.layers.1.self_attn.k_proj", PLANTED):  # on a cluster, an earlier block comes again
        skipped = runs.trial(name)
        runs.switch(name, True)
        assert measure(model, common) == skipped
        runs.switch(name, False)
    assert measure(model, common)["kl"] == 0
    runs.undo.close()


def test_the_planted_layer_comes_first_and_the_model_is_left_as_it_was() -> None:
    model = llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = sensitivity(model, samples(), ["int4_wo_32", "int4_wo_32+gptq", "float"])
    assert found.ranked("int4_wo_32")[0].layer == PLANTED
    assert len(found.layers) == 21 and "lm_head" not in found.layers
    assert all(trial.loss == 0 for trial in found.ranked("float"))
    sums = [sum(trial.loss for trial in found.ranked(name)) for name in ("int4_wo_32+gptq", "int4_wo_32")]
    assert 0 < sums[0] < sums[1]
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in before.items()
    }


def test_a_trial_is_what_quantizing_only_that_layer_gives() -> None:
    from quark.torch import ModelQuantizer

    model, name = llama(), "model.layers.2.mlp.up_proj"
    found = sensitivity(model, samples(), ["mxfp4"], metric="sqnr")
    values = {"scheme": "int8", "exclude": ["*"], "layers": {}}
    config = config_of({**values, "scheme": "mxfp4", "exclude": []}, model)
    config.exclude = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != name]
    reference = [model(**one).logits.detach() for one in samples()]
    ModelQuantizer(config).quantize_model(model)
    pairs = [(x.double(), model(**one).logits.detach().double()) for x, one in zip(reference, samples(), strict=True)]
    noise = sum(((x - y) ** 2).sum() for x, y in pairs) / sum((x**2).sum() for x, _ in pairs)
    trial = found.of(name, "mxfp4")
    assert trial is not None and trial.loss == pytest.approx(float(noise), rel=1e-5)


class TwoHeads(nn.Module):
    """Two answers; the second one's layer does not fit integers of one scale."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.names = names or ("first", "second")
        self.body, self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        with torch.no_grad():
            self.second.weight[0, 0] = 50.0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(x).relu()
        return {name: of(hidden) for name, of in zip(self.names, (self.first, self.second, lambda x: x), strict=False)}


@pytest.mark.parametrize("names", [(), ("logits", "pred_boxes", "last_hidden_state")], ids=["heads", "detector"])
@pytest.mark.parametrize("estimate", [False, True])
def test_every_output_counts(estimate: bool, names: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    model, data = TwoHeads(*names), [torch.randn(8, 16) for _ in range(8)]
    config = {"scheme": "int8", "exclude": []}
    candidates = ["int8", "int4_wo_per_channel", "float"]
    found = search(model, data, candidates, SearchGoal("sqnr>=30", estimate=estimate), config=config)
    assert found.met and found.layers["second"] == "float" and found.reported is not None and found.reported < 60
    trial = found.study.of("second", "int8")
    assert trial is not None and trial.loss == pytest.approx(1.5e-3, rel=0.7)
    assert "kl is of the first" not in caplog.text
    errors = search(model, data, candidates, SearchGoal("mse<=1e-3", estimate=estimate), config=config)
    assert errors.met and errors.study.metric == "sqnr"
    sensitivity(model, data[:1], ["int8"], {"exclude": []})
    assert "kl is of the first of the model's 2 outputs" in caplog.text


def test_losses_and_metrics_are_those_of_the_onnx_flow(caplog: pytest.LogCaptureFixture) -> None:
    """One network of two answers in both flows; codes are nearly alike (127 and 127.5 of them, biases)."""
    net, data = TwoHeads(), [torch.randn(8, 16) for _ in range(4)]
    graph = """g (float[8,16] x) => (float[8,8] first, float[8,8] second) {
        [body] a = Gemm<transB=1>(x, w0, b0) h = Relu(a) [first] first = Gemm<transB=1>(h, w1, b1)
        [second] second = Gemm<transB=1>(h, w2, b2) }"""
    layers = (net.body, net.first, net.second)
    arrays = {f"w{k}": one.weight.detach().numpy() for k, one in enumerate(layers)}
    proto = onnx_models.model(graph, arrays | {f"b{k}": one.bias.detach().numpy() for k, one in enumerate(layers)})
    feeds = [{"x": one.numpy()} for one in data]
    floats = {"preset": "A8W8", "options": {"OpTypesToExcludeOutputQuantization": ["Gemm"]}}  # as torch leaves outputs
    there = onnx_sensitivity(proto, floats, feeds, ["int8/int8"], metric="sqnr")
    here = sensitivity(net, data, ["int8"], {"exclude": []}, metric="sqnr")
    for name in ("body", "first", "second"):
        one, other = here.of(name, "int8"), there.of(name, "int8/int8")
        assert one is not None and other is not None
        assert one.loss == pytest.approx(other.loss, rel=0.35)
        assert one.metrics["sqnr"] == pytest.approx(other.metrics["sqnr"], abs=2.0)
    onnx_sensitivity(proto, "A8W8", feeds, ["int8/int8"], metric="kl")
    assert "kl is of the first of the model's 2 outputs" in caplog.text


def test_blocks_are_not_skipped_where_an_output_is_of_one_of_them(tmp_path: Path) -> None:
    for told, blocks in ((True, 0), (False, 3)):
        model = llama().model
        model.config.output_hidden_states = told
        (tmp_path / str(told)).mkdir()
        common = lay_out(model, samples(), tmp_path / str(told))
        runs = open_runs(model, config_of({"scheme": "int4_wo_32", "exclude": []}, model), common)
        assert len(runs.blocks) == blocks and len(common.reference(0)) == (5 if told else 1)
        alone = runs.trial("layers.2.mlp.up_proj")
        runs.blocks = {}
        assert runs.trial("layers.2.mlp.up_proj") == alone
        runs.undo.close()


class PairedBlock(nn.Module):
    """Returns its hidden state, and another value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.linear(x).relu(), None


class Paired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PairedBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


def test_blocks_that_are_skipped_return_as_many_values_as_blocks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, data = Paired().eval(), [torch.randn(4, 32)]
    skipping = sensitivity(model, data, ["mxfp4"], metric="sqnr")
    monkeypatch.setattr("quark.torch.layer_runs.find_chain", lambda runs: None)
    assert [one.loss for one in skipping.trials] == [
        one.loss for one in sensitivity(model, data, ["mxfp4"], metric="sqnr").trials
    ]


def test_nothing_is_compared_with_a_float_model_whose_metric_is_no_number(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("score = lambda model: float('inf')\n")
    with pytest.raises(ConfigError, match="the metric of the float model is inf"):
        sensitivity(nn.Linear(32, 4), [torch.ones(2, 32)], ["mxfp4"], metric=f"{tmp_path / 'task.py'}:score")


def test_a_function_of_the_users_may_have_the_name_of_a_measure(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("import torch\nsqnr = lambda model: model(torch.ones(2, 32)).sum().item()\n")
    model, metric = nn.Linear(32, 4), f"{tmp_path / 'task.py'}:sqnr"
    found = sensitivity(model, [torch.ones(2, 32)], ["mxfp4", "float"], {"exclude": []}, metric=metric)
    assert [row[3] for row in layer_table(found).rows] == [f"{model(torch.ones(2, 32)).sum().item():.4g}"]


def stored(folder: Path, layers: list[str]) -> int:
    """Bytes of the tensors of some layers in the files of a folder."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                if any(name.startswith(f"{layer}.") for layer in layers):
                    total += file.get_tensor(name).nbytes
    return total


def test_the_plan_that_the_command_writes_quantizes_to_its_size(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out = folder / "plan.yaml", folder / "out"
    kinds = [word for name in ("int4_wo_32", "mxfp4", "int8_wo_per_channel") for word in ("-c", name)]
    given = ["--data", str(folder / "ids.npy"), "--seq-len", "24", "--samples", "2"]
    call = ["torch", "search", str(folder / "model"), "-o", str(plan), "--target", "kl<=0.1", *kinds, *given, "--json"]
    assert main(call) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["value"] <= 0.1 < told["uniform"]["int4_wo_32"]["kl"]
    assert told["layers"][PLANTED] == "int8_wo_per_channel"
    assert told["costs"]["size"] < told["uniform"]["int8_wo_per_channel"]["size"]
    assert read_values(plan)["layers"] == told["layers"]
    assert main(["torch", "quantize", str(folder / "model"), "-o", str(out), "--config", str(plan), *given]) == 0
    assert stored(out, list(told["layers"])) == told["costs"]["size"]


def test_a_calibration_method_behind_a_scheme_finds_the_ranges_or_is_refused_in_one_sentence() -> None:
    """Every scheme with every method: inputs first, else weights, and nothing else of the scheme changes."""
    for name in NAMES:
        plain = scheme(name)
        slots = [slot for slot in ("input_tensors", "weight") if has_range(getattr(plain, slot))]
        for method in SEARCHES:
            if not slots:
                with pytest.raises(ConfigError, match="nothing in this scheme has a range"):
                    scheme(f"{name}:{method}")
                continue
            found = scheme(f"{name}:{method}")
            own = getattr(found, slots[0])
            assert own.calibration_method == method and base_name(f"{name}:{method}") == name
            assert own.to_stage().spec.granularity == getattr(plain, slots[0]).to_stage().spec.granularity
            kept = {slot: getattr(plain, slot) for slot in slots[:1]}
            assert replace(found, **kept) == plain
    with pytest.raises(ConfigError, match="Did you mean 'mse'"):
        scheme("int4_wo_32:mes")


def has_range(config: Any) -> bool:
    block = isinstance(config, QTensorConfig) and isinstance(config.to_stage().format, Block)
    return isinstance(config, QTensorConfig) and not block and config.to_stage().calibrated


def test_a_layer_is_tried_under_a_calibration_method_as_its_file_quantizes_it() -> None:
    model, names, layer = llama(), ("int4_wo_per_channel", "int4_wo_per_channel:mse"), "model.layers.2.self_attn.k_proj"
    rest = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != layer]
    study = sensitivity(model, samples(1), names, {"exclude": rest})
    losses = {one.candidate: one.loss for one in study.trials}
    assert set(losses) == set(names) and len(set(losses.values())) == 2
    config = config_of({"scheme": names[0], "layers": {layer: names[1]}}, model)
    assert config.layer_quant_config[layer].weight == scheme(names[1]).weight


def test_an_algorithm_for_single_layers_leaves_the_others_alone() -> None:
    from quark.torch import ModelQuantizer

    model, other = llama(), llama()
    tuned = "model.layers.0.mlp.up_proj"
    layers = {tuned: "int4_wo_32+gptq"}
    for chosen, one in ((layers, model), ({}, other)):
        quantizer = ModelQuantizer(config_of({"scheme": "int4_wo_32", "layers": chosen}, one))
        quantizer.freeze(quantizer.quantize_model(one, samples()))
    weights = [
        {name: m.weight for name, m in one.named_modules() if isinstance(m, nn.Linear)} for one in (model, other)
    ]
    changed = [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])]
    assert changed == [tuned]


def test_a_layer_that_a_candidate_does_not_fit_gets_another() -> None:
    model = nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 8))
    data = [torch.randn(4, 64, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    found = search(model, data, ["int4_wo_32", "int8_wo_per_channel"], SearchGoal(limit=1e9))
    assert found.study.of("2", "int4_wo_32") is None
    cheap = search(model, data, ["int4_wo_32", "int8_wo_per_channel"], "sqnr>=1")
    assert cheap.layers == {"0": "int4_wo_32", "2": "int8_wo_per_channel"}


def test_a_plan_for_vllm_has_one_scheme_for_what_it_fuses_and_an_unreached_target_is_told() -> None:
    kinds = ["int4_wo_32", "int8_wo_per_channel"]
    free, bound = (
        search(llama(), samples(4), kinds, TorchSearchGoal("kl<=0.1", program=program)) for program in (None, "vllm")
    )
    groups = [
        [f"model.layers.{k}.{part}" for part in parts]
        for k in range(3)
        for parts in (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("mlp.gate_proj", "mlp.up_proj"),
        )
    ]
    assert all(len({bound.layers[name] for name in group}) == 1 for group in groups)
    assert any(len({free.layers[name] for name in group}) > 1 for group in groups)
    assert bound.met and bound.reported is not None and "hint" in bound.notes[0]
    missed = search(llama(), samples(1), ["int4_wo_32"], "kl<=1e-12")
    assert not missed.met and missed.reported is None


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """Killed for certain, as a part of `auto`: ``tests/test_kills.py``."""

    def stop(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    ledger = tmp_path / "ledger.json"
    with pytest.raises(KeyboardInterrupt):
        sensitivity(llama(), samples(), ["int4_wo_32"], trying=Trying(ledger=ledger, progress=stop))
    assert len(json.loads(ledger.read_text())["values"]) == 5
    seen: list[int] = []
    again = sensitivity(
        llama(), samples(), ["int4_wo_32"], trying=Trying(ledger=ledger, progress=lambda done, total: seen.append(done))
    )
    assert seen == list(range(6, 22))
    assert again.trials == sensitivity(llama(), samples(), ["int4_wo_32"]).trials
    with pytest.raises(ConfigError, match="another data"):
        sensitivity(llama(), samples(1), ["int4_wo_32"], trying=Trying(ledger=ledger))
    other = llama()
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    with pytest.raises(ConfigError, match="another model"):
        sensitivity(other, samples(), ["int4_wo_32"], trying=Trying(ledger=ledger))


@pytest.mark.slow
def test_processes_change_nothing(folder: Path) -> None:
    alone, shared = (sensitivity(folder / "model", samples(), ["int4_wo_32"], trying=Trying(workers=n)) for n in (1, 2))
    assert [trial.loss for trial in alone.trials] == [trial.loss for trial in shared.trials]


def test_threads_do_not_meet_in_one_model(folder: Path) -> None:
    """With ``--backend threading``: one after the other."""
    alone = sensitivity(folder / "model", samples(), ["int4_wo_32"])
    with joblib.parallel_config("threading"):
        shared = sensitivity(folder / "model", samples(), ["int4_wo_32"], trying=Trying(workers=4))
    assert [(trial.layer, trial.loss) for trial in shared.trials] == [(one.layer, one.loss) for one in alone.trials]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"target": "kl<=1", "candidates": ["int4_wo_33"]}, "Did you mean 'int4_wo_32'"),
        ({"target": "kl<=1", "candidates": ["int4_wo_32+awq"]}, "algorithm for single layers"),
        ({"target": "kl<=1", "candidates": ["float"]}, "no candidate quantizes"),
        ({"target": "kl>=1"}, "kl<=1"),
        ({"target": "kl<=1", "budget": "bytes"}, "unknown budget"),
        ({"target": "kl<=1", "program": "vlm"}, "Did you mean 'vllm'"),
        ({"target": "kl<=1", "program": "llama.cpp", "candidates": ["mxfp4"]}, "no mxfp4 layer"),
        ({"target": "kl<=1", "workers": 2}, "give its folder"),
        ({"target": "kl<=1", "config": {"scheme": "mxfp4", "layers": {"model.*": "float"}}}, "nothing to search"),
    ],
)
def test_mistakes_are_told(arguments: dict[str, Any], words: str) -> None:
    arguments = dict(arguments)
    with pytest.raises(ConfigError) as error:
        kinds, config = (
            arguments.pop(name, usual) for name, usual in (("candidates", ["int4_wo_32"]), ("config", None))
        )
        trying = Trying(arguments.pop("workers", 1))
        search(llama(), samples(1), kinds, TorchSearchGoal(**arguments), config, trying)
    assert words in str(error.value)


def test_a_whole_configuration_is_accepted_by_quantize(folder: Path, tmp_path: Path) -> None:
    model = llama()
    path = tmp_path / "whole.json"
    path.write_text(json.dumps(config_of({"scheme": "int8_wo_per_channel"}, model).to_dict()))
    assert main(["torch", "quantize", str(folder / "model"), "-o", str(tmp_path / "o"), "--config", str(path)]) == 0
    bad = ["torch", "quantize", str(folder / "model"), "-o", str(tmp_path / "p"), "--config", str(path)]
    assert main([*bad, "--kv-cache", "fp8"]) == 1
    assert main([*bad, "--scheme", "fp8"]) == 2


def test_a_plan_is_saved_as_json_too(tmp_path: Path) -> None:
    found = search(llama(), samples(1), ["int8_wo_per_channel"], "kl<=9")
    save_plan(tmp_path / "plan.json", None, found, "kl<=9", "size")
    assert read_values(tmp_path / "plan.json")["layers"] == dict(found.layers)


def test_multiplications_of_layers_are_those_of_their_definitions() -> None:
    layers = {
        "linear": (nn.Linear(6, 10), (2, 5, 6), 2 * 5 * 6 * 10),
        "conv": (nn.Conv2d(4, 6, 3, groups=2, padding=1), (2, 4, 8, 8), 2 * 8 * 8 * 6 * 2 * 9),
        "up": (nn.ConvTranspose2d(4, 6, 2, stride=2), (1, 4, 8, 8), 8 * 8 * 4 * 6 * 4),
        "conv1d": (transformers.pytorch_utils.Conv1D(10, 6), (3, 6), 3 * 6 * 10),
        "rows": (nn.Embedding(7, 5), None, 0),
    }
    for name, (layer, shape, wanted) in layers.items():
        given = torch.tensor([[1, 2]]) if shape is None else torch.randn(shape)
        found = traffic_of(nn.Sequential(layer), ["0", "1"], given)
        assert found == {"0": (given.numel(), wanted)}, name


def test_a_table_of_energies_is_a_budget(tmp_path: Path) -> None:
    path, names, model = tmp_path / "npu.yaml", ("int4_wo_32", "int8_wo_per_channel", "float"), llama()
    path.write_text("float/int4: 1\nfloat/int8: 3\nfloat/float: 20\n")
    macs = sum(one.weight.numel() * 24 for name, one in model.named_modules() if name.endswith("_proj"))
    cheap = search(model, samples(8), names, SearchGoal("kl<=1000", str(path), estimate=True))
    assert cheap.costs["energy"] == macs and set(cheap.layers.values()) == {"int4_wo_32"}
    found = search(model, samples(8), names, SearchGoal(budget=str(path), limit=3 * macs, estimate=True))
    assert macs < found.costs["energy"] <= 3 * macs and found.value < cheap.value
    for name, types in (("nvfp4", "fp4/fp4"), ("int4_fp8", "fp8_e4m3/int4"), ("float", "float/float")):
        assert types_of(name) == types
    with pytest.raises(ConfigError, match="no line 'float/uint4', for the candidate 'uint4_wo_32'"):
        ASKED.target(SearchGoal("kl<=1", str(path)), ["uint4_wo_32"])


def test_types_of_gguf_are_candidates_with_the_bytes_of_the_file(tmp_path: Path) -> None:
    """Two layers, two types: the plan is carried out, and the file has the types and the bytes of the plan."""
    gguf = pytest.importorskip("gguf")
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**shape, num_hidden_layers=1, vocab_size=64, max_position_embeddings=64)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    data = [{"input_ids": torch.randint(0, 64, (1, 16))} for _ in range(4)]
    found = search(
        model,
        data,
        ("Q2_K", "Q6_K", "float"),
        TorchSearchGoal("kl<=1e-4", rounds=3, program="llama.cpp"),
        config="Q2_K",
    )
    kinds = set(found.layers.values())
    sizes = {"Q2_K": 84, "Q6_K": 210, "float": 512}  # bytes of 256 numbers
    assert {trial.candidate: trial.costs["size"] for trial in found.study.trials} == {
        name: 256 * size for name, size in sizes.items()
    }
    save_plan(tmp_path / "plan.yaml", "Q2_K", found, "kl<=1e-4", "size")
    values = read_values(tmp_path / "plan.yaml")
    ModelQuantizer(config_of(values, model)).quantize_model(model)
    vocabulary = {"<s>": 0, "</s>": 1, **{chr(97 + k): k + 2 for k in range(26)}}
    tokens = {"type": "BPE", "vocab": vocabulary, "merges": []}
    steps = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": tokens, "pre_tokenizer": steps, "decoder": steps}))
    export_gguf(model, tmp_path, "llama", tmp_path)
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    names |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    tensors = {one.name: one for one in gguf.GGUFReader(tmp_path / "llama.gguf").tensors}
    for layer, kind in found.layers.items():
        tensor = tensors[f"blk.0.{names[layer.rpartition('.')[2]]}.weight"]
        assert tensor.tensor_type.name == {"float": "F16"}.get(kind, kind)
        assert tensor.n_bytes == 256 * sizes[kind]
    assert kinds <= set(sizes)


def test_algorithms_that_choose_codes_do_not_go_with_types_that_do() -> None:
    with pytest.raises(ConfigError, match=r"'Q4_K\+gptq': Q4_K chooses codes with its scales, so 'gptq' cannot"):
        search(nn.Linear(256, 4), [torch.randn(2, 256)], ("Q4_K+gptq", "float"), "kl<=1")
    given = QConfig(scheme("Q4_K"), algo_config=[GPTQConfig()])
    with pytest.raises(ConfigError, match="'gptq' chooses the codes of '0', and Q4_K chooses them with its scales"):
        ModelQuantizer(given).check(nn.Sequential(nn.Linear(256, 4)))
    quark.register_algorithm("mine", lambda weight, hessian, grid: weight)
    try:
        with pytest.raises(ConfigError, match="Q4_K chooses codes with its scales, so 'mine' cannot"):
            check_candidate("Q4_K+mine")
        given.algo_config = [AlgoConfig.from_dict({"name": "mine"})]
        with pytest.raises(ConfigError, match="'mine' chooses the codes of '0'"):
            ModelQuantizer(given).check(nn.Sequential(nn.Linear(256, 4)))
    finally:
        quark.unregister_algorithm("mine")
