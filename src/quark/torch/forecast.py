"""``quark torch plan``: every decision about a checkpoint, from the names and shapes in its files; no value is read.

What is decided here is what ``quantize_checkpoint`` carries out: both call ``decide``. The plan is the value that the
ONNX flow has, so tables, JSON, ``explain`` and ``quark plan diff`` are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from quark.config.plan import Plan
from quark.torch.config.model import QConfig, check_available
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.files.decision import decide
from quark.torch.files.quantize import jobs_of
from quark.torch.matching import is_static


@dataclass(frozen=True)
class Forecast:
    """What a quantization would make of a checkpoint.

    Attributes:
        plan: the decisions; nodes are layers.
        float_bytes, bytes: of all tensors now and then, in the layout of format quark.
        largest: bytes of the largest tensor in float32, of which file to file has a few in memory.
        samples: whether static activations need data.
    """

    plan: Plan
    float_bytes: int
    bytes: int
    largest: int
    samples: bool


def forecast(checkpoint: Checkpoint, config: QConfig, pack_method: str = "reorder") -> Forecast:
    """Decide about every tensor.

    Raises:
        ConfigError: a pattern that matches nothing, or a configuration that a tensor does not fit.
        ModelError: files that are missing or broken, or nothing to quantize.
    """
    check_available(config)
    decision = decide(checkpoint, config)
    jobs = jobs_of(checkpoint, checkpoint.folder, decision, pack_method, "cpu")
    sizes = [stored.dtype.itemsize * prod(stored.shape) for stored in decision.tensors.values()]
    return Forecast(
        decision.found.plan,
        sum(sizes),
        sum(item.size for job in jobs for item in job.items()),
        max((4 * prod(one.shape) for one in decision.tensors.values()), default=0),
        any(map(is_static, decision.found.quantized)),
    )
