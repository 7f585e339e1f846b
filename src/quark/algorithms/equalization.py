"""Equalization by data: scale channels so that weights and activations can each share one scale per tensor.

    y = W2 · v,  v = f(W1 x + b)        W1, b, v -> W1 / s, b / s, v / s        W2 -> W2 · s

A tensor t whose largest magnitude is R_t is rounded in steps of R_t / 2^(bits - 1), whatever the channel. Seen from y,
its noise is what its channels' steps, scaled back, weigh there:

    J(s) = sum_t 4^-bits_t R_t(s)^2 sum_c n_tc s_c^±2        R_t(s) = max_c r_tc s_c^∓1

+ for tensors that are divided by s, - for those that are multiplied. J is lowered channel by channel, over powers of
two where s itself is stored in the graph in few bits. Cross-layer equalization (``cle.py``) balances the two weights
alone; here the activations between them, and biases in few bits, count as well.

Not handled: tensors with a scale per channel (leave their term out: no choice of s changes it).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quark.dataclass import dataclass

SWEEPS = 3
FLOOR, TINY = 1e-4, 1e-30
"""Channels weaker than this part of the strongest count as that strong."""
_STEPS = np.array([0, -1, 1, -2, 2, -8, 8])
NEAR = 1 + 1e-7
"""Ratio of two costs that are told apart by sums which change with each channel, instead of sums made anew."""


@dataclass(frozen=True)
class Term:
    """One tensor of a chain.

    Attributes:
        largest: r [C], the largest magnitude of every channel.
        noise: n [C], what one step of this tensor weighs in every channel, at s = 1.
        bits: of the tensor.
        divided: whether s divides it; otherwise it is multiplied.
    """

    largest: np.ndarray
    noise: np.ndarray
    bits: float
    divided: bool


def floored(power: np.ndarray) -> np.ndarray:
    """Mean squares [C], none below a small part of the largest."""
    return np.asarray(np.maximum(power, FLOOR * power.max() + TINY))


def share(squares: np.ndarray | None, power: np.ndarray) -> np.ndarray:
    """What a unit of noise in every channel is at the result of a layer, its signal being 1, [C].

    Args:
        squares: sums of the squared weights that read each channel; None: each channel has a result of its own.
        power: mean squares of the channels.
    """
    if squares is None:
        return np.asarray(1 / power / len(power))
    return np.asarray(squares / max((squares * power).sum(), TINY))


def weight_term(largest: np.ndarray, square: np.ndarray, signal: np.ndarray, bits: float, divided: bool) -> Term:
    """The term of a weight: largest magnitudes and mean squares of its channels, and what its signal weighs there."""
    return Term(largest, signal / floored(square), bits, divided)


def equalizing_scales(
    terms: Sequence[Term], before: np.ndarray, widest: float = 64.0, grain: float = 1.0
) -> np.ndarray:
    """s per channel, float64 [C].

    Args:
        terms: at least one; where the channels have scales already, those of the scaled tensors.
        before: these scales; the result includes them and is 1 at most.
        widest: the largest ratio of two scales.
        grain: log2 s moves in steps of this; 1: powers of two.
    """
    steps, given = _STEPS * grain, np.log2(before)
    exponents = np.zeros(len(given))
    limit = np.floor(np.log2(widest))
    for _ in range(SWEEPS):
        start, sums = exponents.copy(), _Sums(terms, given, exponents, steps)
        for channel in map(int, np.argsort(-terms[0].largest, kind="stable")):
            spread, costs = sums.spread(channel), sums.costs(channel)
            allowed = spread <= max(limit, spread[0])
            costs = np.where(allowed, costs, np.inf)
            if np.count_nonzero(costs <= costs.min() * NEAR) > 1:  # too near for sums that are carried on
                tried = np.tile(exponents, (len(steps), 1))
                tried[:, channel] += steps
                costs = np.where(allowed, cost(terms, tried), np.inf)
            best = int(costs.argmin())
            if best:
                sums.move(channel, best)
        if (exponents == start).all():
            break
    return np.asarray(2.0 ** (given + exponents - (given + exponents).max()))


class _Sums:
    """What J is made of, so that one step of a channel costs one channel's work; ``exponents`` [C] move with it."""

    def __init__(self, terms: Sequence[Term], given: np.ndarray, exponents: np.ndarray, steps: np.ndarray) -> None:
        signs = np.array([[1.0 if term.divided else -1.0] for term in terms])
        s = 2.0 ** (signs * exponents)
        self.given, self.exponents, self.steps = given, exponents, steps
        self.at = given + exponents
        self.factors = 2.0 ** (signs * steps)  # of a channel's s, [terms, steps]
        self.squares = np.square(self.factors)
        self.weights = np.array([4.0**-term.bits for term in terms])
        self.ranges = np.array([term.largest for term in terms]) / s  # [terms, C]
        self.parts = np.array([term.noise for term in terms]) * s * s
        self.sums = self.parts.sum(1)

    def spread(self, channel: int) -> np.ndarray:
        """The largest difference of two exponents after each step of a channel, [steps]."""
        at, before = self.at, self.at[channel]
        moved = self.given[channel] + (self.exponents[channel] + self.steps)
        at[channel] = -np.inf
        highest = at.max()
        at[channel] = np.inf
        lowest = at.min()
        at[channel] = before
        return np.asarray(np.maximum(highest, moved) - np.minimum(lowest, moved))

    def costs(self, channel: int) -> np.ndarray:
        """J after each step of a channel, nearly, [steps]."""
        own, part = self.ranges[:, channel].copy(), self.parts[:, channel]
        self.ranges[:, channel] = -np.inf
        others = self.ranges.max(1)
        self.ranges[:, channel] = own
        ranges = np.maximum(others[:, None], own[:, None] / self.factors)
        sums = (self.sums - part)[:, None] + part[:, None] * self.squares
        return np.asarray(self.weights @ (np.square(ranges) * sums))

    def move(self, channel: int, step: int) -> None:
        """Make a step of a channel."""
        self.exponents[channel] += self.steps[step]
        self.at[channel] = self.given[channel] + self.exponents[channel]
        self.ranges[:, channel] /= self.factors[:, step]
        part = self.parts[:, channel] * self.squares[:, step]
        self.sums += part - self.parts[:, channel]
        self.parts[:, channel] = part


def cost(terms: Sequence[Term], exponents: np.ndarray) -> np.ndarray:
    """J for every row of log2 s [rows, C]."""
    total = np.zeros(len(exponents))
    for term in terms:
        s = 2.0 ** (exponents if term.divided else -exponents)
        total += 4.0**-term.bits * (term.largest / s).max(1) ** 2 * (term.noise * s * s).sum(1)
    return total
