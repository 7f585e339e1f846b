"""What one labelled sample says about a model's outputs: classes, masks, sounds, tokens. Arrays only."""

from __future__ import annotations

import numpy as np

IGNORED = 255  # class of pixels of a mask that count for nothing


def among_first(scores: np.ndarray, label: int, first: int) -> float:
    """1 where the class is among the ``first`` largest of scores [classes], 0 where it is not; NaN is the smallest."""
    flat = np.where(np.isfinite(scores.ravel()), scores.ravel(), -np.inf)
    order = np.argsort(-flat, kind="stable")[:first]
    return float(label in order and np.isfinite(flat[label]))


def overlaps(predicted: np.ndarray, truth: np.ndarray, classes: int) -> np.ndarray:
    """[2, classes] pixels that both call a class, and that either does; pixels of the class 255 count for nothing."""
    known = truth != IGNORED
    a, b = predicted[known].astype(np.int64), truth[known].astype(np.int64)
    both = np.bincount(a[a == b], minlength=classes)
    either = np.bincount(a, minlength=classes) + np.bincount(b, minlength=classes) - both
    return np.stack([both[:classes], either[:classes]])


def mean_overlap(counts: np.ndarray) -> float:
    """Mean intersection over union of ``overlaps`` [samples, 2, classes], over the classes that occur."""
    both, either = counts.sum(0)
    return float((both[either > 0] / either[either > 0]).mean()) if (either > 0).any() else 0.0


def si_sdr(reference: np.ndarray, estimate: np.ndarray) -> tuple[float, float]:
    """Energies of the part of a sound that is the reference and of the rest: their ratio is the SI-SDR."""
    x, y = reference.ravel().astype(np.float64), estimate.ravel().astype(np.float64)
    energy = float(x @ x)
    target = x * (float(y @ x) / energy) if energy else np.zeros_like(x)
    return float(target @ target), float((y - target) @ (y - target))


def decibels(energies: np.ndarray) -> float:
    """SI-SDR in dB of ``si_sdr`` [samples, 2], all samples as one sound."""
    signal, noise = energies.sum(0)
    return float(10 * np.log10((signal + 1e-30) / (noise + 1e-30)))


def log_loss(logits: np.ndarray, ids: np.ndarray) -> tuple[float, int]:
    """Σ -log p(next token) in nats and the number of tokens, of logits [batch, T, vocabulary] for ids [batch, T]."""
    x, wanted = logits[:, :-1].astype(np.float64), ids[:, 1:, None].astype(np.int64)
    x = x - x.max(-1, keepdims=True)
    chosen = np.take_along_axis(x, wanted, -1)[..., 0] - np.log(np.exp(x).sum(-1))
    return -float(chosen.sum()), int(chosen.size)


def perplexity(losses: np.ndarray) -> float:
    """exp of the mean loss, of ``log_loss`` [samples, 2]."""
    total, tokens = losses.sum(0)
    return float(np.exp(total / max(tokens, 1)))
