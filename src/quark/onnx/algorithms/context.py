"""What an algorithm of the ONNX flow may use besides the model and the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from quark.config.job import Job
from quark.config.rules import NodeInfo
from quark.dataclass import dataclass
from quark.files.journal import Journal
from quark.onnx.scratch import Scratch


@dataclass(frozen=True)
class JobContext:
    """The job, the calibration data, finished work, a place for files, who hears of progress, and the nodes that the
    configuration may name. ``reference`` is the float model before the first of several algorithms changed weights."""

    job: Job
    reader: Any
    scratch: Scratch
    journal: Journal
    progress: Callable[[str, int, int | None], None]
    known: Sequence[NodeInfo] = ()
    reference: ir.Model | None = None
