"""``auto``: the parts of the samples, the choice among trials, the command with its files and exit codes."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from tests.onnx_flow.models import model

from quark.cli import main
from quark.demo import data
from quark.errors import ConfigError
from quark.onnx.auto import SLOWER, OnnxSearch, auto, quantized
from quark.onnx.climb import Attempt, Climb
from quark.onnx.compare import Checks, compare
from quark.onnx.latency import quiet_seconds
from quark.onnx.recipes import RECIPES, Choice
from quark.onnx.trials import PURPOSES, OnnxGoal, OnnxTrial
from quark.report.verdict import Judged, worst
from quark.search.auto import LATE
from quark.search.parts import split

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("auto")
    shutil.copy(data.model_path(), found / "model.onnx")
    np.savez(found / "samples.npz", image=data.split()[0][0][:16])
    return found


def samples() -> list[dict[str, np.ndarray]]:
    return [{"image": image[None]} for image in data.split()[0][0][:16]]


@pytest.mark.parametrize("purpose", list(PURPOSES))
def test_the_cheapest_within_the_tolerance_wins(folder: Path, tmp_path: Path, purpose: str) -> None:
    model, parts = folder / "model.onnx", split(samples())
    found = auto(model, parts, OnnxGoal(purpose, seconds=1), tmp_path)
    good = [trial for trial in found.trials if trial.passes]
    assert found.winner.path is not None and good
    if purpose == "size":
        assert found.winner.bytes == min(trial.bytes for trial in good) < model.stat().st_size
    if purpose == "npu":
        assert found.solved and found.winner.choice == Choice("XINT8")
    if found.winner.choice is not None:  # what is reported is what the file gives on the part that decided nothing
        again = compare(model, found.winner.path, parts.report, Checks(layers=False))
        assert found.reported == worst(again.outputs, again.answers)


def test_a_metric_of_the_user_decides_and_a_miss_is_said(folder: Path, tmp_path: Path) -> None:
    model = folder / "model.onnx"

    def metric(path: str) -> float:
        return 1.0 if path == str(model) else 0.5

    found = auto(model, split(samples()), OnnxGoal("npu", 0.1, metric, seconds=0.0), tmp_path)
    assert not found.solved and found.float_value == 1.0 and found.winner.value == 0.5
    assert not any(trial.passes for trial in found.trials)
    assert auto(model, split(samples()), OnnxGoal("npu", 0.6, metric, seconds=0.0), tmp_path).solved


@pytest.mark.parametrize(
    ("value", "chance", "level", "passes"),
    [
        (0.995, math.nan, 0, True),  # a function that returns one number decides alone
        (0.985, math.nan, 2, False),
        (0.985, 0.02, 2, True),  # within one standard error
        (0.985, 0.02, 1, False),  # so few labels that the verdict has to be good as well
        (0.995, 0.02, 1, False),
        (0.995, 0.005, 0, True),
        (0.975, 0.02, 2, False),
    ],
)
def test_one_standard_error_is_tolerated_where_the_verdict_agrees(
    folder: Path, tmp_path: Path, value: float, chance: float, level: int, passes: bool
) -> None:
    goal = OnnxGoal("npu", None, lambda path: 1.0)
    search = OnnxSearch(folder / "model.onnx", split(samples()), goal, tmp_path, print)
    trial = OnnxTrial("t", Choice("XINT8"), Judged("y", level, "", 1.0, 20.0), value, chance=chance)
    assert search.within(trial, {}) is passes


def test_labels_too_few_to_see_the_tolerance_do_not_tell_trials_apart(folder: Path, tmp_path: Path) -> None:
    goal = OnnxGoal("npu", None, lambda path: 1.0)
    search = OnnxSearch(folder / "model.onnx", split(samples()), goal, tmp_path, print)
    lucky = OnnxTrial("lucky", Choice("XINT8"), Judged("y", 1, "", 0.82, 7.0), 0.99, chance=0.05)
    alike = OnnxTrial("alike", Choice("BF16"), Judged("y", 1, "", 0.94, 19.0), 0.92, chance=0.05)
    assert search.nearest([lucky, alike]) is alike
    assert search.nearest([replace(lucky, chance=0.005), replace(alike, chance=0.005)]).name == "lucky"
    search.trials = [lucky, alike]  # the first one says for all of them whether the metric or the agreement counts
    assert search.nearest([replace(lucky, chance=0.005), alike]) is alike


def test_cheaper_types_win_for_an_npu_however_accurate_the_dearer_ones(folder: Path, tmp_path: Path) -> None:
    search = OnnxSearch(folder / "model.onnx", split(samples()), OnnxGoal("npu", seconds=0.0), tmp_path, print)

    def trial(preset: str, sqnr: float, layers: int = 0) -> OnnxTrial:
        choice = Choice(preset, layers={f"l{k}": "float" for k in range(layers)})
        return OnnxTrial(choice.name, choice, Judged("y", 2, "", sqnr, sqnr), passes=True)

    ranked = [trial("A8W8_PER_CHANNEL", 24.0), trial("A8W8", 21.0), trial("A8W8", 22.0, 1), trial("A16W8", 47.0)]
    ranked.append(trial("BF16", 50.0))
    for k in range(len(ranked)):
        assert search.cheapest(ranked[k:][::-1]) is ranked[k]


def test_float_is_the_answer_where_nothing_is_faster_but_never_for_an_npu(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "quark.onnx.auto.quiet_seconds",
        lambda models, feed, seconds, libraries: {name: 1.0 if name == "float" else 2.0 for name in models},
    )
    found = auto(folder / "model.onnx", split(samples()), OnnxGoal("cpu", seconds=0.0), tmp_path)
    assert not found.solved and found.winner.choice is None and "faster" in found.notes[-1]
    found = auto(folder / "model.onnx", split(samples()), OnnxGoal("npu", seconds=0.0), tmp_path)
    assert found.winner.choice is not None


def test_where_every_preset_is_slower_float_stays_and_more_time_is_not_advised(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnnxSearch, "speed", lambda self, trial: 0.5)
    monkeypatch.setattr(OnnxSearch, "within", lambda self, trial, answers: False)
    line = ["auto", str(folder / "model.onnx"), "-o", str(tmp_path / "best.onnx"), "--minutes", "0.2"]
    assert main([*line, "--data", str(folder / "samples.npz"), "--exclude", "/body/body.4/body.4.0/Conv"]) == 3
    told = capsys.readouterr().out
    assert "nothing to win in time" in told and "--for size" in told and "--minutes 10" not in told
    assert "--exclude /body/body.4/body.4.0/Conv" in told.splitlines()[-1]
    assert b"QuantizeLinear" not in (tmp_path / "best.onnx").read_bytes()
    found = auto(folder / "model.onnx", split(samples()), OnnxGoal("cpu", seconds=20), tmp_path)
    assert SLOWER in dict(found.untried).values() and LATE not in dict(found.untried).values()
    made = OnnxSearch.made

    def only_one(self: OnnxSearch, trial: OnnxTrial) -> OnnxTrial:
        if trial.name != "A8W8_CPU":
            raise ConfigError("nothing in the model can be quantized")
        return made(self, trial)

    monkeypatch.setattr(OnnxSearch, "made", only_one)
    found = auto(folder / "model.onnx", split(samples()), OnnxGoal("cpu", seconds=20), tmp_path)
    assert found.winner.name == "float" and any(one.error for one in found.trials), "one cannot be made, the other lags"


def test_what_is_in_float_already_is_no_layer_apart(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what is excluded nor what the preset leaves in float is ranked among the layers that may be put there."""
    tried, layer = [], "/body/body.4/body.4.0/Conv"
    monkeypatch.setattr(OnnxSearch, "attempt", lambda self, trial: tried.append(trial.choice) or trial)
    left = Choice("A8W8", {"FloatWhereFaster": False, "TunedFloat": [layer]})
    for choice in (Choice("A8W8"), Choice("A8W8", exclude=(layer,)), left):
        search = OnnxSearch(folder / "model.onnx", split(samples()), OnnxGoal("npu", seconds=60), tmp_path, print)
        search.layers_apart(Attempt(choice, None), 0.0)
        assert not any(row.last and row.applies(search.situation, choice) for row in RECIPES), (
            "A16W8 is a trial already"
        )
        assert tried and all((one.exclude, one.options) == (choice.exclude, choice.options) for one in tried)
        assert any(layer in one.layers for one in tried) == (choice == Choice("A8W8"))
        tried.clear()


def test_what_is_excluded_stays_float_in_every_trial_and_in_the_recipe(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    samples = ["--data", str(folder / "samples.npz"), "--for", "npu", "--minutes", "0", "--drop", "90%"]
    ledger = ["--ledger", str(tmp_path / "l.json")]
    for name, excluded in (("all", []), ("part", ["--exclude", "/body/body.4/body.4.0/Conv"])):
        out = tmp_path / f"{name}.onnx"
        assert main(["auto", str(folder / "model.onnx"), "-o", str(out), *samples, *excluded]) in (0, 3)
        assert main(["onnx", "explain", str(out), "/body/body.4/body.4.0/Conv"]) == 0
        assert ("Conv '/body/body.4/body.4.0/Conv': float" in capsys.readouterr().out) == bool(excluded)
    assert "exclude:\n- /body/body.4/body.4.0/Conv" in (tmp_path / "part.recipe.yaml").read_text()
    assert main(["auto", str(folder / "model.onnx"), "-o", str(out), *samples, *ledger, "--overwrite"]) in (0, 3)
    again = ["auto", str(folder / "model.onnx"), "-o", str(out), *samples, *ledger, *excluded, "--overwrite"]
    assert main(again) == 1, "the ledger of another question"


def test_goals_that_cannot_be_meant() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'npu'"):
        OnnxGoal("npus")
    with pytest.raises(ConfigError, match="0 to 1"):
        OnnxGoal("cpu", 3.0)


def test_the_command_writes_model_recipe_and_page_and_the_recipe_makes_the_model_again(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "best.onnx"
    words = ["auto", str(folder / "model.onnx"), "-o", str(out), "--data", str(folder / "samples.npz"), "--for", "npu"]
    assert main([*words, "--minutes", "0.05", "--report", str(tmp_path / "r.html")]) == 0
    printed = capsys.readouterr()
    assert "accuracy" in "".join(printed.out.splitlines()[-5:]) and "on samples that decided nothing" in printed.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.onnx", "best.recipe.yaml", "r.html"]
    assert onnxruntime.InferenceSession(out).get_inputs()
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "Why the others lost" in page and "a cheaper one is within the tolerance" in page and "AdaRound" in page
    recipe = str(tmp_path / "best.recipe.yaml")
    again = ["onnx", "quantize", words[1], "-o", str(tmp_path / "q.onnx"), "--data", words[5], "--config", recipe]
    assert main([*again, "--no-check"]) == 0
    assert (tmp_path / "q.onnx").read_bytes() == out.read_bytes()
    (tmp_path / "best.recipe.yaml").write_text("mine: 1\n")
    assert main([*words, "--minutes", "0"]) == 1
    assert "best.recipe.yaml" in capsys.readouterr().err and "mine" in (tmp_path / "best.recipe.yaml").read_text()


def test_a_trial_that_fails_is_listed_with_its_reason() -> None:
    assert OnnxTrial("XINT8", Choice("XINT8"), error="no").passes is False


def test_a_ledger_goes_on_to_the_same_bytes_without_a_trial_made_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, made = tmp_path / "l.json", []
    quantized = OnnxSearch._quantized

    def counted(self: OnnxSearch, choice: Choice, path: Path) -> object:
        made.append(path.name)
        return quantized(self, choice, path)

    monkeypatch.setattr(OnnxSearch, "_quantized", counted)
    monkeypatch.setattr("quark.onnx.climb.RECIPES", ())  # all trials end in time
    monkeypatch.setattr("quark.onnx.auto.TIMED", 0.0)  # sizes decide
    monkeypatch.setattr(OnnxSearch, "layers_apart", lambda *args: None)
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        goal = OnnxGoal("size", drop=0.0, ledger=ledger)  # time enough: a trial more could win
        outcome = auto(folder / "model.onnx", split(samples()), goal, tmp_path / name)
        assert outcome.winner.path is not None
        found.append((outcome.winner.name, outcome.winner.path.read_bytes(), [one.name for one in outcome.trials]))
        made.append("")
    assert found[0][:2] == found[1][:2] and found[1][2][: len(found[0][2])] == found[0][2]
    again = made[made.index("") + 1 : -1]
    assert all(name.startswith("again") for name in again[: len(found[0][2])] if len(found[0][2]) == len(found[1][2]))
    with pytest.raises(ConfigError, match="another data"):
        auto(folder / "model.onnx", split(samples()[:8]), OnnxGoal("size", drop=0.0, ledger=ledger), tmp_path / "a")


def test_comparisons_on_few_samples_are_kept_and_are_the_same_in_processes(folder: Path, tmp_path: Path) -> None:
    images, choices = data.split()[0][0][:36], [Choice("XINT8"), Choice("A8W8"), Choice("XINT8", {"SimulateDPU": 3})]
    parts, ranks = split([{"image": image[None]} for image in images]), []
    for workers in (1, 2):
        ledger = tmp_path / f"{workers}.json"
        for _ in range(2):  # again from the ledger
            goal = OnnxGoal("npu", ledger=ledger, workers=workers)
            ranks.append(OnnxSearch(folder / "model.onnx", parts, goal, tmp_path, print).probe(choices))
    assert ranks[0] == ranks[1] == ranks[2] == ranks[3]
    assert ranks[0][0] is not None and ranks[0][2] is None  # the last one cannot be made
    idle = Choice("XINT8", {"FloatDecoding": True})  # there is nothing to decode
    search = OnnxSearch(folder / "model.onnx", parts, OnnxGoal("npu"), tmp_path, print)
    assert search.probe([choices[0], idle])[1] == () and search.same == {idle.name: "XINT8"}


def test_a_trial_whose_model_was_judged_is_not_judged_again_and_says_so(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    idle, asked, ledger = Choice("XINT8", {"FloatDecoding": True}), list[str](), tmp_path / "l.json"

    def metric(path: str) -> float:
        asked.append(path)
        return 1.0

    for _ in range(2):  # again from the ledger
        goal = OnnxGoal("npu", metric=metric, ledger=ledger)
        search = OnnxSearch(folder / "model.onnx", split(samples()), goal, tmp_path, print)
        first, second, third = (search.attempt(OnnxTrial.of(one)) for one in (Choice("XINT8"), idle, Choice("A8W8")))
        assert (first.same, second.same, third.same) == ("", "XINT8", "")
        left_out: dict[str, Any] = {"name": "", "choice": None, "path": None, "same": "", "chance": 0.0}
        assert np.isnan([first.chance, second.chance]).all()
        assert replace(second, **left_out) == replace(first, **left_out)
        assert f"{idle.name}: metric 1, the same model as XINT8" in capsys.readouterr().out
    assert len(asked) == 3  # the float model, and two others


def test_what_the_engine_proposes_is_tried_on_all_presets_before_anything_else_and_trials_tell_what_they_mend(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(self: OnnxSearch, trial: OnnxTrial) -> OnnxTrial:
        """Only A16W8 with what is proposed is good; cheaper types never are, whatever is tried on them."""
        self.propose(["set FloatDecoding"])
        made = trial.choice or Choice("")
        good = made.preset == "A16W8" and "FloatDecoding" in made.options
        return replace(trial, judged=Judged("y", 2 if good else 0, "", 20.0 * good, 20.0 * good), passes=good, bytes=9)

    monkeypatch.setattr(OnnxSearch, "made", judge)
    monkeypatch.setattr(OnnxSearch, "with_file", lambda self, trial: replace(trial, path=self.model))
    monkeypatch.setattr(OnnxSearch, "layers_apart", lambda *args: None)
    found = auto(folder / "model.onnx", split(samples()), OnnxGoal("npu", seconds=20), tmp_path)
    tried = [one.choice for one in found.trials]
    proposed = [Choice(name, {"FloatDecoding": True}) for name in ("XINT8", "A8W8", "A16W8")]
    assert tried[:7] == [Choice(name) for name in PURPOSES["npu"].bases] + proposed
    assert found.solved and found.winner.choice == proposed[2] and found.winner.causes
    assert len(tried) > 10 and not any("BF16" in one.name for one in found.trials[4:])
    assert len({one.name for one in found.trials}) == len(tried)
    assert all(one.causes for one in found.trials[4:])
    causes = {cause for one in found.trials for cause in one.causes}
    assert not {one.name for one in RECIPES if one.cause in causes} & {name for name, _ in found.untried}


@pytest.mark.parametrize("solvable", [True, False])
def test_where_nothing_is_within_the_nearest_preset_is_improved_first_and_cheaper_ones_after_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, solvable: bool
) -> None:
    levels, improved = {"XINT8": 1.0, "A8W8": 3.0, "A16W8": 9.0, "BF16": 2.0}, list[str]()

    def judge(self: OnnxSearch, trial: OnnxTrial) -> OnnxTrial:
        return replace(trial, judged=Judged("y", 0, "", levels[trial.name], 0.0), bytes=9)

    def improve(self: OnnxSearch, climb: Climb, seconds: float) -> bool:
        improved.append(climb.first.choice.preset)
        return solvable and climb.first.choice.preset == "A16W8"

    monkeypatch.setattr(OnnxSearch, "made", judge)
    monkeypatch.setattr(OnnxSearch, "improved", improve)
    monkeypatch.setattr(OnnxSearch, "with_file", lambda self, trial: replace(trial, path=self.model))
    auto(folder / "model.onnx", split(samples()), OnnxGoal("npu", seconds=20), tmp_path)
    assert improved == ["A16W8", "XINT8", "A8W8", *([] if solvable else ["BF16"])]


@pytest.mark.parametrize(("purpose", "seconds"), [("npu", 1.0), ("cpu", 1.0), ("size", 0.5)])
def test_slow_trials_keep_the_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, purpose: str, seconds: float
) -> None:
    slow, made, begun = 0.3, quantized, list[float]()

    def slowly(*args: Any) -> Any:
        begun.append(time.perf_counter() - start)
        time.sleep(slow)
        return made(*args)

    monkeypatch.setattr("quark.onnx.auto.quantized", slowly)
    start = time.perf_counter()
    found = auto(folder / "model.onnx", split(samples()), OnnxGoal(purpose, 0.0, seconds=seconds), tmp_path)
    assert found.trials and begun  # the first one always begins; of the others, those that end in time
    assert all(one + slow <= seconds for one in begun[1:])


def test_labels_choose_and_what_is_reported_is_top_1_on_samples_that_decided_nothing(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    images, labels = (part[:16] for part in data.split()[0])
    (tmp_path / "classes.txt").write_text("\n".join(str(int(label)) for label in labels))
    words = ["auto", str(folder / "model.onnx"), "-o", str(tmp_path / "best.onnx"), "--for", "npu", "--minutes", "0"]
    words += ["--data", str(folder / "samples.npz"), "--labels", str(tmp_path / "classes.txt")]
    assert main(words) == 0
    session = onnxruntime.InferenceSession(tmp_path / "best.onnx")
    right = [session.run(None, {"image": images[k : k + 1]})[0].argmax() == labels[k] for k in range(3, 16, 4)]
    assert f"top1: {100 * np.mean(right):.1f} % on samples that decided nothing" in capsys.readouterr().out
    (tmp_path / "classes.txt").write_text("0\n1\n")
    assert main([*words, "--overwrite"]) == 1 and "has 2 labels for 16 samples" in capsys.readouterr().err
    (tmp_path / "classes.txt").write_text("cat\n" * 16)
    assert main([*words, "--overwrite"]) == 1 and "'cat' is not a class" in capsys.readouterr().err


TASK = """
def zero(path):
    return float(path.endswith("model.onnx"))
def near(path):
    return 1.0 if path.endswith("model.onnx") else 0.95
def nan(path):
    return float("nan")
def fails(path):
    return {}["nothing"]
"""
ENDS = {
    "solved": ((), 0, ("result    solved: XINT8, of 1 trial\n", "next      quark onnx compare ")),
    "late": (("--metric", "zero"), 3, ("100 % lost, 1 % may be", "result    not solved", "--minutes 10 --overwrite")),
    "near": (("--metric", "near", "--minutes", "0.3"), 3, ("5 % lost", "result    not solved", "--drop 5% ")),
    "nan": (("--metric", "nan"), 1, ("the metric of the float model is nan", "docs/")),
    "fails": (("--metric", "fails"), 1, ("raised KeyError in line 9 of task.py: 'nothing'", "docs/")),
    "target": (("--for", "vllm"), 1, ("cpu, npu, size, for an ONNX model; programs such as vllm", "docs/auto.md")),
    "data": (("--data", "none.npz"), 1, ("'none.npz' does not exist", "docs/cli.md#samples")),
    "drop": (("--drop", "3"), 1, ("from 0 to 1", "docs/auto.md")),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_last_five_lines_tell_the_verdict_and_what_to_type(
    end: str, folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, code, told = ENDS[end]
    monkeypatch.setattr("quark.onnx.auto.RECIPES", ())
    monkeypatch.setattr("quark.onnx.climb.RECIPES", ())
    monkeypatch.setattr("quark.onnx.auto.OnnxSearch.layers_apart", lambda *args: None)
    (tmp_path / "task.py").write_text(TASK)
    given = {"--data": str(folder / "samples.npz"), "--for": "npu", "--minutes": "0"}
    given |= dict(zip(words[::2], words[1::2], strict=True))
    if "--metric" in given:
        given["--metric"] = f"{tmp_path / 'task.py'}:{given['--metric']}"
    line = ["auto", str(folder / "model.onnx"), "-o", str(tmp_path / "best.onnx")]
    assert main([*line, *(word for pair in given.items() for word in pair)]) == code
    said = capsys.readouterr()
    last = "\n".join((said.out if code in (0, 3) else said.err).splitlines()[-5:])
    assert [one for one in told if one not in last] == [], last


@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("labels", [(), ("--labels",)])
def test_where_no_samples_are_set_apart_no_figure_is_said_to_be_of_those_that_decided_nothing(
    count: int, labels: tuple[str, ...], folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    images, classes = data.split()[0]
    np.savez(tmp_path / "few.npz", image=images[:count])
    (tmp_path / "classes.txt").write_text("\n".join(str(int(one)) for one in classes[:count]))
    words = ["auto", str(folder / "model.onnx"), "-o", str(tmp_path / "q.onnx"), "--data", str(tmp_path / "few.npz")]
    words += [*labels, *([str(tmp_path / "classes.txt")] if labels else []), "--for", "npu", "--minutes", "0"]
    assert main(words) in (0, 3)
    said = capsys.readouterr().out
    assert ("decided nothing" in said) == ("\ngap " in said) == (count >= 4)


def test_tokens_per_window_are_for_folders(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["auto", str(next(folder.glob("*.onnx"))), "--random", "-o", str(tmp_path / "q.onnx"), "--seq-len", "8"]
    assert main(words) == 1
    assert "--seq-len is for the folders" in capsys.readouterr().err


def test_a_winner_that_other_samples_do_not_confirm_is_not_called_solved(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    images = np.array(data.split()[0][0][:16])
    images[3::4] *= 50  # those that are reported on, far outside of what fitted and chose
    np.savez(tmp_path / "drift.npz", image=images)
    line = ["auto", str(folder / "model.onnx"), "-o", str(tmp_path / "best.onnx"), "--for", "npu", "--minutes", "0"]
    for more, wanted in (
        (["--data", str(tmp_path / "drift.npz")], False),
        (["--data", str(folder / "samples.npz")], True),
    ):
        assert main([*line, *more, "--overwrite"]) == 0
        last = "\n".join(capsys.readouterr().out.splitlines()[-5:])
        assert ("not confirmed: XINT8" in last, "quark onnx compare" in last) == (not wanted, wanted), last


@pytest.mark.parametrize(("value", "confirmed"), [(0.5, False), (0.95, True)])
def test_a_metric_confirms_on_its_own_reporting_samples(
    folder: Path, tmp_path: Path, value: float, confirmed: bool
) -> None:
    model = folder / "model.onnx"

    def reporting(path: str) -> float:
        return 1.0 if path == str(model) else value

    goal = OnnxGoal("npu", 0.1, lambda path: 1.0, seconds=0.0, reporting=reporting)
    found = auto(model, split(samples()), goal, tmp_path)
    assert found.solved and found.confirmed == confirmed
    assert auto(model, split(samples()), OnnxGoal("npu", 0.1, lambda path: 1.0, seconds=0.0), tmp_path).confirmed


def of_speed(table: dict[str, float]) -> Any:
    """``OnnxSearch.speed`` by hand: of the first name in the table that the trial's begins with."""
    return lambda self, trial: next(value for name, value in table.items() if trial.name.startswith(name))


@pytest.mark.parametrize(
    ("plain", "tuned", "worth"),
    [(1.5, 9.0, "A8W8_CPU"), (0.8, 1.2, "A8W8_CPU --set TuneSpeed=True"), (0.8, 0.9, None), (1.0, 0.9, "A8W8_CPU")],
)
def test_a_preset_that_is_no_faster_than_float_gets_what_this_machine_times(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: float, tuned: float, worth: str | None
) -> None:
    monkeypatch.setattr(OnnxSearch, "speed", of_speed({"A8W8_CPU --set TuneSpeed": tuned, "A8W8_CPU": plain}))
    monkeypatch.setattr("quark.onnx.tuned_speed._chosen", lambda seconds: "by the table")
    monkeypatch.setattr("quark.onnx.tuned_speed.SECONDS", 0.0)  # whatever is measured
    for again in range(2):  # and from the ledger
        search = OnnxSearch(
            folder / "model.onnx", split(samples()), OnnxGoal("cpu", ledger=tmp_path / "l.json"), tmp_path, print
        )
        found = search.promising(search.attempt(OnnxTrial.of(Choice("A8W8_CPU"))))
        assert (found.name if found else None) == worth
        assert any("no recipe was tried" in note for note in search.notes) == (worth is None)
        if worth and "Tune" in worth:
            assert found and found.choice and found.causes == ("integers where float is faster on this machine",)
            assert set(found.choice.options) == {"TuneSpeed", "TunedFloat"} and not found.choice.options["TuneSpeed"]
            path = tmp_path / f"same{again}.onnx"
            quantized(search.model, found.choice, path, search.samples.fit)  # without timing anything
            assert search.with_file(found).path.read_bytes() == path.read_bytes()  # type: ignore[union-attr]


def test_a_model_that_timing_leaves_in_float_is_no_trial(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quark.onnx.tuned_speed._chosen", lambda seconds: "all in float")
    monkeypatch.setattr("quark.onnx.tuned_speed.SECONDS", 0.0)  # whatever is measured
    search = OnnxSearch(folder / "model.onnx", split(samples()), OnnxGoal("cpu"), tmp_path, print)
    trial = search.attempt(OnnxTrial.of(Choice("A8W8_CPU", {"TuneSpeed": True})))
    assert "everything is faster in float" in trial.error


def test_of_trials_that_the_clock_cannot_tell_apart_the_more_accurate_one_wins(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"A8W8_CPU": 1.0, "UINT8_DYNAMIC_QUANT": 1.01}

    def timed(self: OnnxSearch, trials: list[OnnxTrial], _: float) -> list[OnnxTrial]:
        return [OnnxTrial("float", None, seconds=2.0), *(replace(one, seconds=seconds[one.name]) for one in trials)]

    def judge(self: OnnxSearch, trial: OnnxTrial) -> OnnxTrial:
        value = 30.0 if trial.name == better else 25.0
        return replace(trial, judged=Judged("y", 2, "", value, value), passes=True, bytes=9)

    monkeypatch.setattr(OnnxSearch, "made", judge)
    monkeypatch.setattr(OnnxSearch, "timed", timed)
    monkeypatch.setattr(OnnxSearch, "with_file", lambda self, trial: replace(trial, path=self.model))
    for better in seconds:
        assert auto(folder / "model.onnx", split(samples()), OnnxGoal("cpu"), tmp_path).winner.name == better
    seconds["UINT8_DYNAMIC_QUANT"] = 1.2
    assert auto(folder / "model.onnx", split(samples()), OnnxGoal("cpu"), tmp_path).winner.name == "A8W8_CPU"


def test_a_sample_may_have_numbers_that_are_no_arrays() -> None:
    """What indexing a row of numbers gives, as a file of samples with an input of no axes does."""
    proto = model("g (float x) => (float y) { y = Neg(x) }", {})
    assert quiet_seconds({"": proto}, {"x": np.zeros(3, np.float32)[1]}, 0.0)[""] > 0
