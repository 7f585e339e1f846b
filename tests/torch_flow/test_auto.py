"""``auto`` for torch: the smallest scheme that a program reads, proved on other samples; folder, recipe, page."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.killing import llama as tiny
from tests.torch_flow import test_search
from tests.torch_flow.test_search import samples
from torch import nn

import quark
from quark.cli import main
from quark.errors import ConfigError
from quark.measure.outputs import Outputs, scores
from quark.measure.score import Score
from quark.report import file_size
from quark.search.target import Target
from quark.torch.auto import TorchGoal, TorchOutcome, TorchSearch, TorchTrial, auto, reads, reported_on
from quark.torch.config.schemes import GGUF, NAMES
from quark.torch.language import load_model

pytest.importorskip("transformers")
Capture = pytest.CaptureFixture[str]


def llama() -> nn.Module:
    """A small Llama without the planted layer: four bits are enough."""
    model = test_search.llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.normal_(0, 0.2)
    return model


def test_the_smallest_within_the_tolerance_wins_and_the_model_is_left_as_it_was() -> None:
    model, data = llama(), samples(8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = auto(model, data, TorchGoal("transformers", seconds=0.0))
    assert not found.solved and len(found.trials) == 1 and found.untried  # no time: one trial, the others are named
    found = auto(model, data, TorchGoal("vllm", drop=0.3))
    assert found.solved and found.target.metric == "cosine"  # the perplexity of random weights means nothing
    good = [one for one in found.trials if one.passes]
    assert found.winner.bytes == min(one.bytes for one in good) < found.float_bytes / 2
    assert all(one.bytes >= found.winner.bytes or not one.passes for one in found.trials)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_what_is_reported_is_what_the_written_folder_gives_on_samples_that_decided_nothing(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "llama")
    data = samples(8)
    found = quark.auto(tmp_path / "llama", data, tmp_path / "out", "vllm", drop=0.3, minutes=1)
    assert reads([found.winner.values["scheme"]], "vllm") and found.reported is not None
    model, twin = load_model(tmp_path / "llama"), load_model(tmp_path / "out")
    with torch.no_grad():
        pairs = [(model(**one).logits.flatten().double(), twin(**one).logits.flatten().double()) for one in data[3::4]]
    x, y = (torch.cat(side) for side in zip(*pairs, strict=True))
    assert float(nn.functional.cosine_similarity(x, y, 0)) == pytest.approx(found.reported[0], abs=1e-4)
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert found.winner.bytes == pytest.approx(size, rel=0.1)


def test_a_model_that_is_no_language_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 8))
    data = [torch.randn(4, 64, generator=torch.Generator().manual_seed(k)) for k in range(8)]
    found = quark.auto(model, data, purpose="transformers", minutes=1)
    assert found.solved and found.target.metric == "sqnr" and found.reported is not None
    missed = auto(model, data, TorchGoal("transformers", metric=lambda one: float(id(one) == 0), drop=0.0, seconds=0.0))
    assert missed.solved and missed.reported is None and "function" in missed.notes[-1]


def jackknifed(value: float, spread: float) -> Score:
    """A metric of three samples, and without each of them."""
    return Score(value, (value - spread, value, value + spread))


@pytest.mark.parametrize(
    ("target", "after", "before", "confirmed"),
    [
        (Target("perplexity", False, 10.1), 20.1, 20.0, True),  # 1 % of what the float model has on these samples
        (Target("perplexity", False, 10.1), 20.5, 20.0, False),
        (Target("perplexity", False, 10.1), jackknifed(20.5, 0.6), 20.0, True),  # half of that is chance
        (Target("perplexity", False, 10.1), jackknifed(20.5, 0.3), 20.0, False),
        (Target("sqnr", True, 20.0), 19.5, math.inf, False),
        (Target("sqnr", True, 20.0), jackknifed(19.5, 0.6), math.inf, True),
        (Target("cosine", True, 0.99), 0.995, 1.0, True),
    ],
)
def test_the_winner_is_confirmed_within_the_tolerance_or_what_is_chance_on_other_samples(
    target: Target, after: float | Score, before: float, confirmed: bool
) -> None:
    winner = TorchTrial("fp8", {"scheme": "fp8"}, target.value, passes=True)
    outcome = TorchOutcome(winner, True, [winner], "quark", target, 10.0, 2)
    score = after if isinstance(after, Score) else Score(after)
    still = {target.metric: Score(before, (before,) * len(score.without))}
    goal = TorchGoal("vllm", None if target.metric == "sqnr" else 0.01)
    found = reported_on(outcome, goal, still, score)
    assert found.confirmed == confirmed and found.reported == (score.value, before)
    spread = 0.0 if not score.without else score.without[2] - score.value
    assert found.chance == pytest.approx(math.sqrt(2 / 3 * 2 * spread**2)) if spread else math.isnan(found.chance)
    assert (
        not replace(found, solved=False).solved
        and not reported_on(replace(outcome, solved=False), goal, still, score).confirmed
    )


def test_measures_without_a_sample_are_those_of_the_other_samples() -> None:
    pairs = [(torch.randn(1, 5, 7), torch.randn(1, 5, 7)) for _ in range(4)]
    ids = torch.arange(5)[None]

    def seen(chosen: list[int]) -> dict[str, float]:
        made = Outputs()
        for k in chosen:
            made.update({"y": pairs[k][0]}, {"y": pairs[k][1]}, True)
            made.follow(pairs[k][1], ids)
        return made.metrics()

    each = [Outputs() for _ in pairs]
    for one, pair in zip(each, pairs, strict=True):
        one.update({"y": pair[0]}, {"y": pair[1]}, True)
        one.follow(pair[1], ids)
    found = scores(each)
    for name, value in seen([0, 1, 2, 3]).items():
        assert found[name].value == pytest.approx(value)
        others = [seen([k for k in range(4) if k != out])[name] for out in range(4)]
        assert found[name].without == pytest.approx(others)


def test_goals_that_cannot_be_meant() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'vllm'"):
        TorchGoal("vlm")
    with pytest.raises(ConfigError, match="0 to 1"):
        TorchGoal("vllm", drop=2.0)
    with pytest.raises(ConfigError, match="cpu, npu and size are for ONNX models"):
        TorchGoal("npu")
    with pytest.raises(ConfigError, match="one trial after the other"):
        quark.auto(nn.Linear(2, 2), [], workers=2)
    with pytest.raises(ConfigError, match="give the folder"):
        quark.auto(nn.Linear(2, 2), [], "out")


def test_the_command_writes_folder_recipe_and_page_and_goes_on_after_a_kill(tmp_path: Path, capsys: Capture) -> None:
    llama().save_pretrained(tmp_path / "llama")
    np.save(tmp_path / "ids.npy", np.stack([one["input_ids"][0].numpy() for one in samples(8)]))
    words = ["auto", str(tmp_path / "llama"), "--data", str(tmp_path / "ids.npy"), "--seq-len", "24", "--drop", "30%"]
    words += ["--for", "transformers", "--minutes", "1", "--ledger", str(tmp_path / "l.json")]
    assert main([*words, "-o", str(tmp_path / "out"), "--report", str(tmp_path / "r.html")]) == 0
    printed = capsys.readouterr().out
    assert "solved" in printed and "samples that decided nothing" in printed and "quark torch evaluate" in printed
    assert "by chance)" in printed and "against the samples that chose it" in printed and " ± " in printed
    kept = json.loads((tmp_path / "l.json").read_text())["values"]
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "a smaller one is within the tolerance" in page
    assert kept and '"scatters":[{' in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert main([*words, "-o", str(tmp_path / "again")]) == 0
    assert main([*words, "-o", str(tmp_path / "out")]) == 1 and "add a file name" not in capsys.readouterr().err
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again"))
    assert first == second
    recipe = ["--config", str(tmp_path / "out.recipe.yaml"), "--data", str(tmp_path / "ids.npy"), "--seq-len", "24"]
    assert main(["torch", "quantize", str(tmp_path / "llama"), "-o", str(tmp_path / "q"), "--no-check", *recipe]) == 0


@pytest.mark.parametrize(
    ("program", "file", "following"),
    [
        ("vllm", "model.safetensors", "quark torch evaluate"),
        ("transformers", "model.safetensors", "quark torch evaluate"),
        ("llama.cpp", "*.gguf", "README.md says how llama.cpp loads it"),
        pytest.param("genai", "*.onnx", "README.md says how onnxruntime-genai loads it", marks=pytest.mark.slow),
    ],
)
def test_the_last_lines_tell_the_size_of_the_file_and_what_reads_it(
    program: str, file: str, following: str, tmp_path: Path, capsys: Capture
) -> None:
    """Formats hold the same codes in files of other sizes; not all of them are read by ``quark torch evaluate``."""
    (tmp_path / "float").mkdir()
    folder, out = tiny(tmp_path / "float"), tmp_path / "out"
    if program == "llama.cpp":
        pytest.importorskip("gguf")
        tokenizers = pytest.importorskip("tokenizers")
        count = json.loads((folder / "config.json").read_text())["vocab_size"]
        words_of_it = tokenizers.Tokenizer(tokenizers.models.BPE({f"w{k}": k for k in range(count)}, []))
        words_of_it.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
        words_of_it.save(str(folder / "tokenizer.json"))
    np.save(tmp_path / "ids.npy", np.arange(128, dtype=np.int64).reshape(16, 8) % 8 + 1)
    words = ["--data", str(tmp_path / "ids.npy"), "--seq-len", "8", "--minutes", "0", "--drop", "90%"]
    assert main(["auto", str(folder), "-o", str(out), "--for", program, *words]) == 0
    last = capsys.readouterr().out.splitlines()[-5:]
    size = next(out.glob(file)).stat().st_size
    assert next(line for line in last if line.startswith("size")).endswith(f"→ {file_size(size)}"), last
    assert following in last[-1]


@pytest.mark.parametrize("kind", [None, "WordLevel"])
def test_a_tokenizer_that_the_program_does_not_have_is_refused_before_anything_is_measured(
    kind: str | None, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "float").mkdir()
    folder = tiny(tmp_path / "float")
    (folder / "tokenizer.json").unlink()
    if kind is not None:
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": kind, "vocab": {"a": 0}}}))
    monkeypatch.setattr("quark.torch.auto.outputs_of", lambda *_: pytest.fail("it was measured"))
    np.save(tmp_path / "ids.npy", np.arange(128, dtype=np.int64).reshape(16, 8) % 8 + 1)
    words = ["--data", str(tmp_path / "ids.npy"), "--seq-len", "8", "--minutes", "0"]
    assert main(["auto", str(folder), "-o", str(tmp_path / "out"), "--for", "llama.cpp", *words]) != 0
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert ("neither tokenizer.model nor tokenizer.json" if kind is None else f"of the type '{kind}'") in told
    assert not (tmp_path / "out").exists()


def test_an_encoder_is_loaded_as_what_it_is_and_judged_by_its_features(tmp_path: Path, capsys: Capture) -> None:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertModel(BertConfig(vocab_size=99, **sizes))
    model.pooler.dense.weight.data = torch.eye(32) / 8  # a random one would be the worst output
    model.save_pretrained(tmp_path / "bert")
    assert type(load_model(tmp_path / "bert")).__name__ == "BertModel"
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 99, (8, 16)))
    data = ["--data", str(tmp_path / "ids.npy"), "--seq-len", "16"]
    words = ["auto", str(tmp_path / "bert"), "-o", str(tmp_path / "out"), *data, "--for", "transformers"]
    assert main([*words, "--minutes", "0.02"]) == 0
    printed = capsys.readouterr().out.splitlines()[-5:]
    assert "sqnr" in "".join(printed) and "solved" in printed[-2] and "--metric task.py:score" in printed[-1]
    assert type(load_model(tmp_path / "out")).__name__ == "BertModel"
    assert main(["torch", "evaluate", str(tmp_path / "out"), *data]) == 1
    assert "BertModel predicts no tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    ["--size 8x8", "--bgr", "--mean 2", "--preprocess a.py:f", "--strict", "--random", "--workers 2", "--labels a.csv"],
)
def test_what_a_folder_does_not_heed_is_refused(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "t.txt").write_text("a text")
    (tmp_path / "a.csv").write_text("0")
    given = [word if not word.endswith(".csv") else str(tmp_path / word) for word in words.split()]
    paths = ["--data", str(tmp_path / "t.txt"), "-o", str(tmp_path / "q")]
    assert main(["auto", str(tmp_path / "model"), "--for", "vllm", *paths, *given]) == 1
    assert f"{given[0]} is for ONNX models" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [0.0, 20.0, 60.0, 90.0, 140.0])
def test_the_time_holds_with_the_report_and_what_is_written_behind_it(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that only these steps move: laying out takes 5 s, what is quantized and judged 10 s, writing as much."""
    from quark.torch import auto as module

    now = [0.0]

    def slow(took: float, function: Any) -> Any:
        def _slow(*args: Any) -> Any:
            now[0] += took
            return function(*args)

        return _slow

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(module, "lay_out", slow(5, module.lay_out))
    monkeypatch.setattr(TorchSearch, "value", slow(10, lambda *_: Score(0.5)))
    found = auto(llama(), samples(8), TorchGoal("vllm", drop=0.01, seconds=seconds))
    written = now[0] + 10
    assert written <= seconds or len(found.trials) == 1
    assert written > seconds - 20 or not any(why == "no time was left" for _, why in found.untried)


def test_what_cannot_be_written_is_not_tried_and_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers reads GGUF too, and llama.cpp does not have this attention; nothing is within the tolerance here."""
    import transformers

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    config = transformers.Gemma3TextConfig(vocab_size=64, num_key_value_heads=2, query_pre_attn_scalar=9, **sizes)
    transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    monkeypatch.setattr(TorchSearch, "made", lambda _, trial: replace(trial, value=float(trial.name == "fp8")))
    rows = [{"input_ids": torch.randint(0, 64, (1, 16))} for _ in range(8)]
    found = quark.auto(tmp_path / "gemma", rows, tmp_path / "out", "transformers", minutes=5)
    refused = {name.partition("+")[0] for name, why in found.untried if "llama.cpp" in why}
    tried = {one.values["scheme"] for one in found.trials}
    assert refused == {*GGUF} and tried == {name for name in NAMES if reads([name], "transformers")} - refused
    assert found.winner.name == "fp8" and not found.solved
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
