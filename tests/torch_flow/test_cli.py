"""``quark torch``: what is typed, what is written, and every mistake in one sentence."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quark.cli import main
from quark.cli.torch_refusals import TOKENIZER
from quark.errors import DataError
from quark.torch import LLMTemplate
from quark.torch.export.api import import_model_from_safetensors
from quark.torch.export.checkpoint import read_checkpoint
from quark.torch.files import quantize
from quark.torch.language import batches, first_windows, perplexity, read_ids, windows

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

Capture = pytest.CaptureFixture[str]
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "runs",
    "into",
    "woods",
    "where",
    "nobody",
    "sees",
    "it",
    "again",
]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of words, a text, lines, and ids."""
    folder = tmp_path_factory.mktemp("torch-cli")
    torch.manual_seed(0)
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]").save_pretrained(folder / "model")
    config = transformers.LlamaConfig(vocab_size=len(vocabulary), **SIZES, initializer_range=0.2)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model", max_shard_size="100KB")
    generator = np.random.default_rng(0)
    words = [WORDS[k] for k in generator.integers(len(WORDS), size=200)]
    (folder / "text.txt").write_text(" ".join(words))
    lines = [
        json.dumps({"text": " ".join(words[:40])}),
        json.dumps(" ".join(words[40:80])),
        json.dumps({"input_ids": [1, 2]}),
    ]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    np.savez(folder / "ids.npz", input_ids=generator.integers(1, 18, (4, 32)))
    np.savez(folder / "foreign.npz", input_ids=np.array([[1, 99, 2]]))
    learned = transformers.GPT2Config(vocab_size=len(vocabulary), n_embd=16, n_layer=1, n_head=2, n_positions=16)
    transformers.GPT2LMHeadModel(learned).save_pretrained(folder / "positions")
    (folder / "metric.py").write_text(
        "def heads(model, tokenizer):\n    return {'vocabulary': len(tokenizer), 'half': 0.5}\n"
    )
    return folder


def typed(*words: object) -> int:
    return main(["torch", *map(str, words)])


def object_on(capture: Capture) -> dict[str, Any]:
    return json.loads(capture.readouterr().out, parse_constant=pytest.fail)


def sentence(capture: Capture) -> str:
    printed = capture.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err
    (error,) = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    return error


@pytest.mark.parametrize("kind", ["npz", "jsonl"])
def test_padding_is_no_text(kind: str, tmp_path: Path) -> None:
    """Ids that a mask hides were calibrated with and measured, as if they were words."""
    ids, mask = [[5, 6, 7, 0], [0, 0, 8, 9]], [[1, 1, 1, 0], [0, 0, 1, 1]]

    def read(mask: list[list[int]]) -> list[list[int]]:
        path = tmp_path / f"data.{kind}"
        rows = [{"input_ids": row, "attention_mask": seen} for row, seen in zip(ids, mask, strict=True)]
        if kind == "npz":
            np.savez(path, input_ids=ids, attention_mask=mask)
        else:
            path.write_text("\n".join(map(json.dumps, rows)))
        return [row.tolist() for row in read_ids(path, pytest.fail)]

    assert read(mask) == [[5, 6, 7], [8, 9]]
    for wrong in ([[1, 1, 1, 2], [0, 0, 1, 1]], [[1, 1, 1], [0, 0, 1]]):
        with pytest.raises(DataError, match=r"attention_mask of .* a 1 or a 0 for each of its input_ids"):
            read(wrong)


@pytest.mark.parametrize("data", ["text.txt", "lines.jsonl", "ids.npz"])
def test_quantize_and_evaluate(data: str, folder: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out"
    options = ["--scheme", "fp8", "--kv-cache", "fp8", "--data", folder / data, "--seq-len", 32, "--json"]
    assert typed("quantize", folder / "model", "-o", output, *options) == 0
    facts = object_on(capsys)
    assert facts["quantized_layers"] == 14 and facts["excluded"] == ["lm_head"] and facts["unreached"] == []
    assert facts["perplexity_after"] == pytest.approx(facts["perplexity_before"], rel=0.1)
    assert facts["perplexity_after"] != facts["perplexity_before"]
    assert facts["bytes_after"] < 0.5 * facts["bytes_before"]
    assert (output / "tokenizer.json").exists()
    assert typed("evaluate", output, "--data", folder / data, "--seq-len", 32, "--json") == 0
    assert object_on(capsys)["perplexity"] == pytest.approx(facts["perplexity_after"], rel=1e-3)


def test_the_perplexity_is_that_of_the_definition(folder: Path, capsys: Capture) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    ids = tokenizer((folder / "text.txt").read_text(), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert perplexity(model, [ids[0]], 1000) == pytest.approx(float(loss.exp()), rel=1e-5)
    parts = list(windows([ids[0]], 64))
    assert sum(len(part) - 1 for part in parts) == len(ids[0]) - 1  # every token once
    assert typed("evaluate", folder / "model", "--data", folder / "text.txt", "--seq-len", 1000) == 0
    assert f"{float(loss.exp()):.2f}"[:-1] in capsys.readouterr().out


@pytest.mark.parametrize("sizes", [(9,), (8,), (2, 9, 5), (1, 1, 7, 3), (4, 4, 4), (1, 5, 1)])
@pytest.mark.parametrize("length", [1, 3, 4, 20])
def test_samples_limit_what_is_measured(sizes: tuple[int, ...], length: int) -> None:
    rows = list(torch.arange(sum(sizes)).split(sizes))
    everything = [part.tolist() for part in windows(rows, length) if len(part) > 1]
    for most in range(1, len(everything) + 2):
        kept = first_windows(rows, length, most)
        assert [part.tolist() for part in windows(kept, length)] == everything[:most]


def test_evaluate_and_quantize_measure_the_same_samples(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    """Of four documents, one window each or several; the figure of all windows is another one."""
    source = ["--data", folder / "lines.jsonl", "--seq-len", 8, "--json"]
    output = tmp_path / "out"
    assert typed("quantize", folder / "model", "-o", output, "--scheme", "fp8", "--samples", 3, *source) == 0
    told = object_on(capsys)["perplexity_before"]
    found = {}
    for most in (None, 3):
        assert typed("evaluate", folder / "model", *source, *([] if most is None else ["--samples", most])) == 0
        found[most] = object_on(capsys)
    assert found[3]["perplexity"] == told != found[None]["perplexity"]
    assert found[3]["tokens"] < found[None]["tokens"]


@pytest.mark.parametrize("kind", ["clip", "wav2vec2", "t5", "dinov2"])
def test_a_model_that_does_not_run_on_tokens_is_told_in_a_sentence(kind: str, tmp_path: Path, capsys: Capture) -> None:
    """Pictures, sound, or the words that a decoder begins with are missing."""
    from tests.consumers import tiny

    tiny.made(kind, dict(tiny.model_types())[kind], {}).save_pretrained(tmp_path / "model")
    np.save(tmp_path / "ids.npy", np.full((2, 8), 5))
    before = sorted(tmp_path.iterdir())
    source, goal = ["--data", tmp_path / "ids.npy", "--seq-len", 8], ["-o", tmp_path / "out", "--scheme", "fp8"]
    layers = ["-c", "int4_wo_32", "-c", "fp8"]
    for words in (
        *(["quantize", *goal], ["quantize", *goal, "--no-check"], ["quantize-files", *goal], ["evaluate"]),
        *(["sensitivity", *layers], ["search", *layers, "-o", tmp_path / "plan.yaml", "--target", "kl<=1"]),
    ):
        assert typed(words[0], tmp_path / "model", *words[1:], *source) == 1, words
        error = sentence(capsys)
        assert re.search("token ids alone|decoder blocks|predicts no tokens|does not run on sample 0", error), error
        assert sorted(tmp_path.iterdir()) == before, words
    words = ["auto", tmp_path / "model", "-o", tmp_path / "out", "--for", "transformers", "--minutes", "1", *source]
    assert main([str(word) for word in words]) == 1
    assert "does not run on sample 0, {input_ids: int64 [1, 8]}" in sentence(capsys)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "words", [["quantize", "-o", "out", "--scheme", "fp8"], ["evaluate"], ["sensitivity", "-c", "fp8"]]
)
def test_text_without_a_tokenizer_is_refused_by_names(
    words: list[str], folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quark.torch.language.load_tokenizer", lambda *_: pytest.fail("it is looked for by loading"))
    (tmp_path / "bare").mkdir()
    shutil.copy(folder / "model/config.json", tmp_path / "bare")
    (tmp_path / "text.txt").write_text("words")
    assert typed(words[0], tmp_path / "bare", *words[1:], "--data", tmp_path / "text.txt") == 1
    assert "bare' holds no tokenizer" in sentence(capsys)


def test_a_file_of_any_tokenizer_is_known_as_one() -> None:
    """All that the tokenizers of transformers read."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    kinds = {tokenizer_class_from_name(name) for name in {*TOKENIZER_MAPPING_NAMES.values()} if name}
    files = {kind.__name__: [*getattr(kind, "vocab_files_names", {}).values()] for kind in kinds if kind}
    unknown = {kind: names for kind, names in files.items() if names and not any(map(TOKENIZER.search, names))}
    assert len(files) > 40 and not unknown


@pytest.mark.parametrize("command", ["quantize", "quantize-files"])
def test_groups_that_do_not_fit_name_what_does(command: str, folder: Path, tmp_path: Path, capsys: Capture) -> None:
    """64 inputs in groups of 128: what the sentence offers is typed until nothing is left to refuse."""
    words: list[str] = []
    while typed(command, folder / "model", "-o", tmp_path / "out", "--scheme", "int4_wo_128", *words):
        layer = re.search("groups of 128 do not divide the 64 inputs of .* --layer '(.+)'", sentence(capsys))
        assert layer and layer[1] not in words
        words += ["--layer", layer[1]]
    assert len(words) == 2 * 6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--scheme", "int4_wo_128"), "groups of 128 do not divide"),
        (("--scheme", "int4_wo_32", "--layer", "*nothing=fp8"), "--layer '*nothing=fp8': '*nothing' matches no layer"),
        (("--scheme", "int4_wo_32", "--exclude", "lm_heads"), "'lm_heads' matches no layer of the model. Did you mean"),
        (("--scheme", "int4_wo_32", "--exclude-only", "model"), "'model' is a module that holds layers"),
    ],
)
def test_what_names_and_shapes_show_is_refused_before_weights_are_read(
    words: tuple[str, ...], said: str, folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quark.torch.language.load_model", lambda *_: pytest.fail("the weights are read"))
    data = folder / "lines.jsonl"
    assert typed("quantize", folder / "model", "-o", tmp_path / "out", *words, "--data", data, "--seq-len", 16) == 1
    assert said in sentence(capsys)


def test_files_are_those_of_memory(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    options = ["--scheme", "int4_wo_32", "--layer", "*down_proj=int8_wo_per_channel", "--json"]
    assert typed("quantize", folder / "model", "-o", tmp_path / "memory", *options) == 0
    assert typed("quantize-files", folder / "model", "-o", tmp_path / "files", *options) == 0
    capsys.readouterr()
    for name in ("memory", "files"):
        assert typed("evaluate", tmp_path / name, "--data", folder / "text.txt", "--json") == 0
    one, other = capsys.readouterr().out.strip().split("\n}\n")
    assert json.loads(one + "}")["perplexity"] == json.loads(other)["perplexity"]


def test_files_with_samples_are_those_of_memory(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    """Static inputs and a static cache, whose scales the windows give; batches change the last bit of a sum at most."""
    options = ["--scheme", "fp8", "--kv-cache", "fp8", "--data", folder / "lines.jsonl", "--seq-len", 16, "--json"]
    options += ["--for", "vllm", "--format", "quark"]
    assert typed("quantize", folder / "model", "-o", tmp_path / "memory", *options) == 0
    assert object_on(capsys)["calibration_windows"] == 4
    assert typed("quantize-files", folder / "model", "-o", tmp_path / "files", *options, "--batch-size", 3) == 0
    assert object_on(capsys)["calibration_windows"] == 4
    one, other = (import_model_from_safetensors(None, tmp_path / name) for name in ("memory", "files"))
    state = other.state_dict()
    for name in ("memory", "files"):
        stored = read_checkpoint(tmp_path / name).names
        assert sum(key.endswith(("attn.k_scale", "attn.v_scale")) for key in stored) == 4
    for name, value in one.state_dict().items():
        torch.testing.assert_close(state[name].float(), value.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
def test_files_leave_float_what_no_sample_reaches(scheme: str, tmp_path: Path, capsys: Capture) -> None:
    """A text does not reach the tower of pictures, which has most of the layers; the file says so, and is read."""
    from tests.consumers import tiny

    model = tiny.made("qwen2_vl", dict(tiny.model_types())["qwen2_vl"], {})
    model.save_pretrained(tmp_path / "model")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 100, (2, 24)))
    given = ["--data", tmp_path / "ids.npy", "--seq-len", 24, "--scheme", scheme]
    given += ["--exclude-only", "*lm_head", "--exclude", "*patch_embed*"]
    assert typed("quantize", tmp_path / "model", "-o", tmp_path / "memory", *given, "--no-check") == 0
    assert typed("quantize-files", tmp_path / "model", "-o", tmp_path / "files", *given) == 0
    assert "no sample reached" in " ".join(capsys.readouterr().err.split()).lower()
    one, other = (import_model_from_safetensors(None, tmp_path / name) for name in ("memory", "files"))
    state = other.state_dict()
    assert set(state) == set(one.state_dict())
    assert any("visual" in name and "weight_scale" in name for name in read_checkpoint(tmp_path / "files").names)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(state[name].float(), value.float(), rtol=1e-5, atol=0)


def test_files_take_algorithms(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    options = ["--scheme", "int4_wo_32", "-a", "gptq", "--data", folder / "lines.jsonl", "--seq-len", 16, "--json"]
    for name, more in (("tuned", options), ("nearest", [*options[:2], "--json"])):
        assert typed("quantize-files", folder / "model", "-o", tmp_path / name, *more) == 0
    one, other = (
        import_model_from_safetensors(None, tmp_path / name).model.layers[0].mlp.up_proj.weight
        for name in ("tuned", "nearest")
    )
    assert one.shape == other.shape and not torch.equal(one, other)


def test_a_killed_job_goes_on_when_the_command_is_repeated(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With files that are finished in the folder already."""
    words = ("quantize-files", folder / "model", "-o", tmp_path / "out", "--scheme", "int4_wo_32")
    whole = quantize.finish

    class Killed(BaseException):
        """Nothing catches it."""

    def killed(*_: object, **__: object) -> None:
        raise Killed

    monkeypatch.setattr(quantize, "finish", killed)
    with pytest.raises(Killed):
        typed(*words)
    made = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.safetensors")}
    assert made
    monkeypatch.setattr(quantize, "finish", whole)
    assert typed(*words) == 0, capsys.readouterr().err
    assert made == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.safetensors")}
    assert typed(*words) == 1  # now there is a model


def test_batches_hold_samples_of_one_length() -> None:
    samples = [{"input_ids": torch.zeros(1, n)} for n in (4, 4, 4, 3, 4)]
    assert [tuple(batch["input_ids"].shape) for batch in batches(samples, 2)] == [(2, 4), (1, 4), (1, 3), (1, 4)]


def test_a_metric_of_ones_own(folder: Path, capsys: Capture) -> None:
    assert typed("evaluate", folder / "model", "--metric", f"{folder / 'metric.py'}:heads", "--json") == 0
    assert object_on(capsys) == {"model": str(folder / "model"), "vocabulary": len(WORDS) + 1, "half": 0.5}


def test_schemes(capsys: Capture) -> None:
    assert typed("schemes", "--json") == 0
    found = object_on(capsys)
    assert list(found["layers"]) == LLMTemplate.get_supported_schemes() and "int8_per_token" in found["kv_cache"]
    assert found["layers"]["int4_wo_128"] == ["int4 per_group of 128", "float"]
    assert typed("schemes") == 0
    assert "int4_wo_128" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["quantize", "model", "-o", "out", "--scheme", "int4_wo_129"], "int4_wo_128"),
        (["quantize", "model", "-o", "out", "--scheme", "fp8", "--kv-cache", "fp9"], "fp8"),
        (["quantize", "model", "-o", "out", "--scheme", "fp8"], "need samples"),
        (["quantize", "model", "-o", "out", "--scheme", "int4_wo_128", "--layer", "x"], "as in '*down_proj="),
        (["quantize", "model", "-o", "out", "--scheme", "int4_wo_32", "--exclude", "*lmhead"], "lm_head"),
        (["quantize", "model", "-o", "model", "--scheme", "int4_wo_32"], "holds a model already"),
        (["quantize", "nowhere", "-o", "out", "--scheme", "int4_wo_32"], "is not a folder"),
        (["quantize", "model", "-o", "out", "--scheme", "fp8", "--data", "metric.py"], "no known kind"),
        (["quantize-files", "model", "-o", "out", "--scheme", "fp8"], "need samples"),
        (["convert", "model", "-o", "out", "--requantize", "fp8"], "use `quark torch quantize-files` with --data"),
        (["quantize-files", "model", "-o", "out", "--scheme", "int4_wo_32", "--kv-cache", "fp8"], "need samples"),
        (["quantize-files", "model", "-o", "out", "--scheme", "int4_wo_32", "-a", "gptq"], "needs samples"),
        (["quantize-files", "model", "-o", "model", "--scheme", "int4_wo_32"], "holds a model already"),
        (["quantize", "model", "-o", "out", "--scheme", "fp8", "--data", "foreign.npz"], "token id 99"),
        (["quantize-files", "model", "-o", "out", "--scheme", "fp8", "--data", "foreign.npz"], "token id 99"),
        (["evaluate", "model", "--data", "foreign.npz"], "token id 99"),
        (["evaluate", "positions", "--data", "ids.npz"], "use --seq-len 16"),
        (["evaluate", "model"], "nothing to measure"),
        (["evaluate", "model", "--metric", "metric.py:feet"], "no function 'feet'"),
        (["evaluate", "model", "--data", "text.rtf"], "does not exist"),
    ],
)
def test_mistakes(
    words: list[str], expected: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(folder)
    assert typed(*words) == 1
    assert expected in sentence(capsys)
    assert not (folder / "out").exists()


def test_code_of_a_model_does_not_run_unasked(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "remote"
    target.mkdir()
    config = {
        "architectures": ["Mine"],
        "model_type": "mine",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (target / "config.json").write_text(json.dumps(config))
    (target / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    assert typed("quantize", target, "-o", tmp_path / "out", "--scheme", "int4_wo_32") == 1
    assert "--trust-remote-code" in sentence(capsys)
    for path in [*(folder / "model").glob("*.safetensors*"), folder / "model" / "tokenizer.json"]:
        shutil.copy(path, target)
    for format in ("compressed-tensors", "gguf", "gptq", "onnx"):  # which need the network, not its tensors alone
        words = ["quantize-files", target, "-o", tmp_path / "out", "--scheme", "int4_wo_32", "--format", format]
        assert typed(*words) == 1
        assert re.search(r"\['Mine'\], which transformers does not have, .* `quark torch quantize", sentence(capsys))
    assert typed(*words[:-2], "--json") == 0
    assert (json.loads(capsys.readouterr().out)["readers"], (tmp_path / "ran").exists()) == ([], False)
    assert [path.name for path in tmp_path.iterdir() if path.name != "remote"] == ["out"]
