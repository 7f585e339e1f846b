"""How far the outputs of a model are from those of another, over all samples: what trials and searches are judged by.

noise    Σ over outputs  Σ (x − y)² / Σ x²     x: float outputs, y: those of the other model; adds up over layers
kl       mean over positions of  Σ p log(p / q),  p, q: softmax of the first output along its last axis, in nats
perplexity   exp(− mean of log q of the token that follows)

``Outputs`` are running sums, ``Loss`` keeps the energies of every sample, so that two models can be compared sample by
sample (``quark.measure.gain``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, fields
from statistics import fmean
from typing import Self

import numpy as np

from quark.dataclass import dataclass
from quark.errors import DataError
from quark.measure.distance import PIECE, Distance
from quark.measure.score import Score, groups_of
from quark.numerics.array import Array, Same, cast, is_torch, namespace

#: Tensors of one sample, by name.
Values = Mapping[str, np.ndarray]
#: The measures of a model that changes nothing.
EXACT = {"sqnr": float("inf"), "cosine": 1.0, "mse": 0.0, "psnr": float("inf"), "noise": 0.0, "kl": 0.0}


@dataclass
class Outputs:
    """The distances of outputs by name, as running sums over samples."""

    distances: dict[str, Distance] = field(default_factory=dict)
    divergence: float = 0.0
    positions: int = 0
    surprise: float = 0.0
    tokens: int = 0

    def update(self, reference: Mapping[str, Array], values: Mapping[str, Array], kl: bool) -> None:
        """Add one sample, ``kl``: with the divergence of its first output; outputs that only the
        reference has, or whose shape depends on values and differs, are left out. Tensors are on the CPU."""
        for number, (name, x) in enumerate(reference.items()):
            y = values.get(name)
            if y is None or x.shape != y.shape:
                continue
            self.distances.setdefault(name, Distance()).update(np.asarray(x), np.asarray(y))
            if kl and not number:
                rows, others = (one.reshape(-1, one.shape[-1]) for one in (x, y))
                step = max(PIECE // x.shape[-1], 1)
                for start in range(0, len(rows), step):
                    part = slice(start, start + step)
                    self.divergence += float(divergence(rows[part], others[part]).sum())
                self.positions += len(rows)

    def follow(self, values: Array, ids: Array) -> None:
        """Add how surprised a language model is by the tokens of one sample.

        Args:
            values: the scores of all words behind each token, [batch, tokens, words].
            ids: the tokens, [batch, tokens].
        """
        said, following = log_softmax(values[:, :-1].reshape(-1, values.shape[-1])), ids[:, 1:].reshape(-1)
        self.surprise -= float(said[range(len(following)), following].sum())
        self.tokens += len(following)

    def __add__(self, other: Self) -> Self:
        """The sums over the samples of both."""
        both, none = (self.distances, other.distances), Distance()
        distances = {name: both[0].get(name, none) + both[1].get(name, none) for name in both[0] | both[1]}
        sums = {one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)[1:]}
        return type(self)(distances, **sums)

    def metrics(self) -> dict[str, float]:
        """The measures: the worst output's SQNR and cosine, the mean MSE, the mean divergence where it was wanted, the
        perplexity of a language model.

        An output that is not a number is the worst, and no measure is a number then.

        Raises:
            DataError: no output had a shape of its own in both models.
        """
        found = [distance for distance in self.distances.values() if distance.count]
        if not found:
            raise DataError("no output of the quantized model has the shape of the float model's")
        noise = sum(one.relative for one in found)
        measured = {
            "sqnr": float(np.min([one.sqnr for one in found])),
            "cosine": float(np.min([one.cosine for one in found])),
            "mse": float(np.mean([one.noise / one.count for one in found])),
            "psnr": float(np.min([one.psnr for one in found])),
            "noise": float(noise),
        }
        measured |= {"kl": max(self.divergence / self.positions, 0.0)} if self.positions else {}
        return measured | ({"perplexity": math.exp(min(self.surprise / self.tokens, 700.0))} if self.tokens else {})


def scores(found: Sequence[Outputs]) -> dict[str, Score]:
    """The measures of samples by name, with what each is without a group of them."""
    groups = [set(group) for group in (groups_of(len(found)) if len(found) > 1 else ())]
    parts = [together(one for k, one in enumerate(found) if k not in group).metrics() for group in groups]
    whole = together(found).metrics()
    return {name: Score(value, tuple(part.get(name, math.nan) for part in parts)) for name, value in whole.items()}


def together(found: Iterable[Outputs]) -> Outputs:
    """The outputs of several samples as one."""
    first, *others = found
    return sum(others, first)


def metric_of(name: str, pairs: Iterable[tuple[Array, Array]]) -> float:
    """A metric of one output over samples of (float, quantized) arrays.

    l2: mean norm of the error. kl: mean divergence of the softmax along the last axis, in nats. cosine: 1 - cosine.
    sqnr, psnr: of all samples together, in dB.
    """
    if name == "l2":
        return float(np.mean([np.linalg.norm(np.asarray(x, np.float64).ravel() - y.ravel()) for x, y in pairs]))
    outputs = Outputs()
    for x, y in pairs:
        outputs.update({name: x}, {name: y}, name == "kl")
    value = outputs.metrics()[name]
    return 1 - value if name == "cosine" else value


def loss_name(metric: str) -> str:
    """The measure that is the loss of a metric."""
    return metric if metric in ("mse", "kl") else "noise"


def divergence(reference: Array, values: Array) -> Same:
    """KL divergence in nats of the softmax along the last axis, per position; NaN where that is no distribution.

    Classes that the reference rules out (-inf) count as nothing, and one that only ``values`` rules out as inf.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        p, q = log_softmax(reference), log_softmax(values)
        xp = namespace(p)
        return xp.where(xp.isneginf(p) & ~xp.isnan(q), 0.0, xp.exp(p) * (p - q)).sum(-1)


def log_softmax(x: Array) -> Same:
    """Along the last axis, in float64."""
    x = cast(x, "float64")
    if is_torch(x):
        return x.log_softmax(-1)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@dataclass(frozen=True)
class Loss:
    """Energies of the difference and of the float model's answer, [samples, outputs]:  Σ over outputs  N / S."""

    noise: np.ndarray
    signal: np.ndarray

    @property
    def total(self) -> float:
        """The loss over all samples."""
        return float(_relative(self.noise.sum(0), self.signal.sum(0)).sum())

    @property
    def each(self) -> np.ndarray:
        """[samples]: the loss of every sample alone."""
        return np.asarray(_relative(self.noise, self.signal).sum(1))


def joined(losses: Iterable[Loss]) -> Loss:
    """The loss over the samples of several."""
    parts = list(losses)
    return Loss(np.concatenate([one.noise for one in parts]), np.concatenate([one.signal for one in parts]))


def loss_of(pairs: Iterable[tuple[Values, Values]]) -> Loss:
    """The loss over samples, of each of which all outputs of both models are given, the float model's first."""
    energies = np.array([_energies(*pair) for pair in pairs], np.float64)
    return Loss(energies[..., 0], energies[..., 1])


def _energies(expected: Values, found: Values) -> list[tuple[float, float]]:
    """(noise, signal) of every output; nothing of those that are not floats or change their shape."""
    row = []
    for name, x in expected.items():
        here = Distance()
        if x.dtype.kind == "f" and x.shape == found[name].shape:
            here.update(x, found[name])
        row.append((here.noise, here.signal))
    return row


def _relative(noise: np.ndarray, signal: np.ndarray) -> np.ndarray:
    return np.where(signal > 0, noise / np.where(signal > 0, signal, 1), noise > 0)


def squared(found: Sequence[Array], wanted: Sequence[Array]) -> float:
    """The mean squared difference of the first answers to a sample."""
    return _mean_square(found[0] - wanted[0])


def shares(found: Sequence[Array], wanted: Sequence[Array]) -> float:
    """The energy of the differences over that of the answers, which all count alike; mean over the answers."""
    pairs = zip(found, wanted, strict=True)
    return fmean(_mean_square(x - y) / max(_mean_square(y), 1e-30) for x, y in pairs)


def scores_apart(found: Sequence[Array], wanted: Sequence[Array]) -> float:
    """The mean KL divergence of the scores that come first, [rows, words]."""
    return float(divergence(wanted[0], found[0]).mean())


def _mean_square(x: Array) -> float:
    return float(cast(x * x, "float64").mean())
