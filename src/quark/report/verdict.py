"""The verdict: what a user needs to know about a quantized model in a line each, and what to type where it is bad.

    runtime    told where ONNX Runtime's optimizations change the accuracy
    accuracy   good, doubtful or lost: by the answers that users read off an output where it has some, by SQNR where not
    speed      faster, same or slower than the float model, on this machine
    size       smaller, same or larger
    coverage   how much of the multiplications and of the weights is quantized

The worst output decides about accuracy. Limits: ``SQNR`` in dB, ``KEPT`` as shares of the float model's answers. Where
an output holds detections (scores, boxes) or labels, only the answers count: the decibels are the background's. A class
that wins moves the level that the decibels give by one step at most, since winners among features mean little, and by
none where it could be chance: up where the share less its standard error is below the limit, down by one answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quark.dataclass import dataclass
from quark.measure.answers import Answers
from quark.measure.distance import Distance
from quark.measure.score import Score
from quark.report.tables import decibels, file_size, milliseconds

LEVELS = ("lost", "doubtful", "good")
SQNR = (10.0, 20.0)  # dB from which an output is doubtful, and good
KEPT = (0.80, 0.95)  # the same for the share of answers
SPREAD = 0.5  # dB of standard error from which it is told
HALF = 0.5  # of multiplications or weights: where less is quantized, hardly anything is won
NEARLY_ALL = 0.95  # of the same: where less is quantized, it is told what is in float and why
SAME = 0.05  # speeds and sizes that differ by less are the same


@dataclass(frozen=True)
class Line:
    """One line: ``subject  word: reason``.

    Attributes:
        subject, word, reason: what it is about, how it is, and what says so.
        bad: whether something should be done about it.
        figure: the number of the reason that a page shows large.
    """

    subject: str
    word: str
    reason: str
    bad: bool = False
    figure: str = ""

    def __str__(self) -> str:
        return f"{self.subject:<10}{self.word}: {self.reason}"


@dataclass(frozen=True)
class Judged:
    """One output.

    Attributes:
        name: of the output.
        level: an index into ``LEVELS``.
        reason: what decided, in words.
        value: what decided: the share of answers that is kept, or dB where there are none.
        sqnr: dB, in any case.
        without: ``value`` without each group of samples (``quark.measure.score``), where it is a share of answers.
    """

    name: str
    level: int
    reason: str
    value: float
    sqnr: float
    without: tuple[float, ...] = ()

    @property
    def score(self) -> Score:
        """What decided, with what is known of samples."""
        return Score(self.value, self.without)


@dataclass(frozen=True)
class Verdict:
    """The lines, the commands that help, and what accuracy was measured on."""

    lines: tuple[Line, ...]
    advice: tuple[str, ...] = ()

    @property
    def bad(self) -> bool:
        """Whether any line is."""
        return any(line.bad for line in self.lines)

    def words(self) -> list[str]:
        """The lines as they are printed, the advice last."""
        return [*map(str, self.lines), *(f"{'next':<10}{one}" for one in self.advice)]

    def facts(self) -> dict[str, Any]:
        """The same for JSON."""
        lines = {line.subject: {"word": line.word, "reason": line.reason, "bad": line.bad} for line in self.lines}
        return {**lines, "next": list(self.advice)}


def judge(name: str, distance: Distance, answers: Answers | None) -> Judged:
    """One output."""
    sqnr, share = distance.sqnr, answers.share if answers is not None else None
    if answers is not None and answers.unlike and not (answers.ranked and share is not None):
        share = share or 0.0
        said = f"{name} has another number of rows in {answers.unlike} of {len(answers.total)} samples"
        return Judged(name, min(level_of(share, KEPT), 1), said, share, sqnr)
    if distance.broken:
        return Judged(name, 0, f"{name} is NaN, or infinite in one of the models only", -math.inf, -math.inf)
    by_energy = level_of(sqnr, SQNR)
    if share is None and _silent(distance):
        return Judged(name, 1, f"{name} is 0 in both models on every sample, which says nothing", sqnr, sqnr)
    if share is None or answers is None:
        few = answers is not None and answers.few
        spread = f" ± {distance.sqnr_error:.1f}" if distance.sqnr_error >= SPREAD else ""
        said = f"SQNR of {name} {decibels(sqnr)}{spread}{', too few answers to count' if few else ''}"
        return _of_channels(Judged(name, by_energy, said, sqnr, sqnr), answers)
    if answers.kind in ("scores", "boxes", "labels"):
        level = level_of(share, KEPT)
    else:
        level = max(by_energy - 1, min(by_energy + 1, _by_classes(by_energy, share, answers)))
    error = "" if math.isnan(answers.error) else f" ± {100 * answers.error:.1f}"
    said = f"{name} keeps {100 * share:.1f}{error} % of the float model's {_WORDS[str(answers.kind)]}"
    reason = f"{said}, SQNR {decibels(sqnr)}" if distance.count else said
    return _of_channels(Judged(name, level, reason, share, sqnr, answers.without), answers)


def _of_channels(found: Judged, answers: Answers | None) -> Judged:
    """An output one of whose channels has lost all is not good, whatever the others keep."""
    lost = None if answers is None else answers.lost_channel
    if lost is None:
        return found
    said = f"{found.reason}, but its channel {lost[0]} is lost: {decibels(lost[1])} about its mean"
    return replace(found, level=min(found.level, 1), reason=said)


def _by_classes(by_energy: int, share: float, answers: Answers) -> int:
    """The level of classes that win: where chance could be what makes it another one, that of the decibels."""
    doubt = answers.chance if math.isnan(answers.error) else answers.error
    return max(level_of(share - doubt, KEPT), min(level_of(share + 1 / answers.count, KEPT), by_energy))


_WORDS = {
    "classes": "top-1 answers",
    "scores": "confident detections",
    "boxes": "confident boxes",
    "labels": "labels",
    "values": "values",
}


def level_of(value: float, limits: tuple[float, float]) -> int:
    """The index into ``LEVELS`` of a figure with these limits."""
    return 0 if math.isnan(value) else sum(value >= limit for limit in limits)


def _told(answers: Answers | None) -> bool:
    """Whether the answers say something where there is no distance: other shapes, or text that is a label."""
    return answers is not None and (
        answers.unlike > 0 or (answers.kind in ("boxes", "labels") and answers.share is not None)
    )


def _silent(distance: Distance) -> bool:
    """Whether an output is 0 in both models, as behind activations that random numbers leave nothing of."""
    return distance.count > 0 and distance.signal == distance.noise == 0


def worst(outputs: Mapping[str, Distance], answers: Mapping[str, Answers]) -> Judged | None:
    """The output that decides: of the lowest level, the one farthest below its limit, and none that is exact or 0
    everywhere, unless all are."""
    seen = [name for name, one in outputs.items() if one.count or _told(answers.get(name))]
    seen = [name for name in seen if not _silent(outputs[name])] or seen
    judged = [judge(name, outputs[name], answers.get(name)) for name in seen]
    return min(judged, key=lambda one: (one.level, one.sqnr == math.inf, one.value), default=None)


def accuracy_line(found: Judged | None, where: str) -> Line:
    """How much of what the float model says is left; ``where``: the samples that say so."""
    if found is None:
        return Line("accuracy", "unknown", "no output that can be compared", bad=True)
    figure = decibels(found.sqnr) if found.value == found.sqnr else f"{100 * found.value:.1f} %"
    bad = found.level < len(LEVELS) - 1
    return Line("accuracy", LEVELS[found.level], f"{found.reason} ({where})", bad, figure)


def runtime_line(name: str, optimized: float, written: float) -> Line:
    """SQNR in dB of a default session, which the accuracy is that of, and of the graph as it is written."""
    reason = f"{name} has {decibels(written)} with ONNX Runtime's optimizations off, {decibels(optimized)} as it runs"
    return Line("runtime", "differs", f"{reason} (one sample)")


def speed_line(before: float, after: float, elsewhere: str = "") -> Line:
    """Seconds per inference of the float and of the quantized model; ``elsewhere``: the device that it is made for."""
    ratio = before / after
    word = "same" if abs(math.log(ratio)) <= math.log1p(SAME) else "faster" if ratio > 1 else "slower"
    made = f"; made for {elsewhere}, whose speed is not measured here" if elsewhere else ""
    reason = f"{ratio:.2f} times as fast as float here ({milliseconds(before)} → {milliseconds(after)}){made}"
    return Line("speed", word, reason, word == "slower" and not elsewhere, f"{ratio:.2f}×")


def size_line(before: int, after: int) -> Line:
    """Bytes of both files."""
    ratio = max(before, after) / max(min(before, after), 1)
    word = "same" if ratio <= 1 + SAME else "smaller" if after < before else "larger"
    much = f"within {100 * (ratio - 1):.1f} %" if word == "same" else f"{ratio:.1f} times"
    reason = f"{much}, {file_size(before)} → {file_size(after)}"
    return Line("size", word, reason, after >= before, f"{before / max(after, 1):.1f}×")


def coverage_line(products: float | None, weights: float, left: Sequence[str] = ()) -> Line:
    """Shares, 0..1, of multiplications in integers (None where none are wanted) and of weights stored as codes."""
    said = [] if products is None else [f"{100 * products:.0f} % of the multiplications in integers"]
    said.append(f"{100 * weights:.0f} % of the weights")
    least = min(weights, 1.0 if products is None else products)
    low, because = least < HALF, f"; in float: {'; '.join(left)}" if least < NEARLY_ALL and left else ""
    figure = f"{100 * (weights if products is None else products):.0f} %"
    return Line("coverage", "low" if low else "quantized", " and ".join(said) + because, low, figure)
