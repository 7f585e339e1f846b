"""``quark torch plan``: every decision about a checkpoint, from the names and shapes in its files; no value is read.

What is decided here is what ``quantize_checkpoint`` carries out: both call ``decide``. The plan is the value that the
ONNX flow has, so tables, JSON, ``explain`` and ``quark plan diff`` are the same. What the job takes is the formula of
``quark.torch.files.needs``; its time is that of this machine, where a product and a piece of a weight are tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod

import torch

from quark.config.plan import Plan
from quark.dataclass import dataclass
from quark.torch.config.model import QConfig, check_available
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.export.layout import store
from quark.torch.fake_quantize import calibrate_with
from quark.torch.files.decision import CheckpointDecision, decide, quantizer_of
from quark.torch.files.needs import Needs, needs_of, work_of
from quark.torch.matching import is_static

DISK = 5e8  # bytes per second
PIECE = 1 << 20  # weights that are tried
SIDE = 512  # of the matrices whose product is tried
RUNS = 5  # of each, of which the fastest counts


@dataclass(frozen=True)
class TorchForecast:
    """What a quantization would make of a checkpoint.

    Attributes:
        plan: the decisions; nodes are layers.
        needs: what file by file takes, with samples where any are needed.
        float_bytes: of all tensors now.
        largest: bytes of the largest tensor in float32, of which file to file has a few in memory.
        samples: whether static activations or algorithms need data.
        seconds: of the job on this machine, from a disk of 500 MB a second.
        by_files: files have the tensors of all layers, so that the job can go file by file.
    """

    plan: Plan
    needs: Needs
    float_bytes: int
    largest: int
    samples: bool
    seconds: float
    by_files: bool = True


def forecast(
    checkpoint: Checkpoint, config: QConfig, samples: int = 128, tokens: int = 512, batch: int = 8, workers: int = 1
) -> TorchForecast:
    """Decide about every tensor.

    Args:
        checkpoint, config: what is quantized, and how.
        samples, tokens, batch: windows, their length, and how many run at once, where any are needed; else as the
            commands take them where nothing is said.
        workers: processes that do it at once.

    Raises:
        ConfigError: a pattern that matches nothing, or a configuration that a tensor does not fit.
        ModelError: files that are missing or broken, or nothing to quantize.
    """
    check_available(config)
    decision = decide(checkpoint, config, in_memory=True)
    data = bool(config.algo_config) or any(map(is_static, decision.found.quantized))
    windows = (samples, tokens, batch) if data else (0, 0, batch)
    needs = needs_of(checkpoint, decision, windows, workers, work_of(config))
    sizes = [stored.dtype.itemsize * prod(stored.shape) for stored in decision.tensors.values()]
    largest = max((4 * prod(one.shape) for one in decision.tensors.values()), default=0)
    seconds = needs.seconds(*speeds(decision), DISK)
    return TorchForecast(decision.found.plan, needs, sum(sizes), largest, data, seconds, decision.by_files)


def speeds(decision: CheckpointDecision) -> tuple[float, float]:
    """Multiplications, and weights rounded and packed, in a second of this machine."""
    side = torch.rand(SIDE, SIDE)
    products = SIDE**3 / timed(lambda: side @ side)
    if not decision.weights:
        return products, 1.0  # only what is inside attention is quantized: nothing is rounded
    name, stored = next(iter(decision.weights.items()))
    rows = max(1, min(stored.shape[0], PIECE // max(1, prod(stored.shape[1:]))))
    piece, quantizer = torch.rand(rows, *stored.shape[1:]), quantizer_of(decision.found.plan, name)

    def rounded() -> None:
        calibrate_with(quantizer, piece)
        store(piece, quantizer)

    return products, piece.numel() / timed(rounded)


def timed(work: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs: what else runs on the machine only adds."""
    found = []
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)
