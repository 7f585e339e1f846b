"""What a process may use: its binding, the quota of its container, and what the user says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quark.onnx.graph.run import session_options
from quark.onnx.graph.session import Runtime
from quark.report import process

MACHINE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUARK_THREADS", raising=False)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "5000 100000"}, 1),
        ({"cpu.max": "damaged"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_the_quota_of_a_container(files: dict[str, str], expected: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert process.quota(tmp_path) == expected
    assert process.lent(tmp_path) == min(expected or MACHINE, MACHINE)


def test_a_session_has_the_threads_that_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then nothing waits by spinning, whatever was asked for."""
    spinning = "session.intra_op.allow_spinning"
    monkeypatch.setattr(os, "cpu_count", lambda: MACHINE)
    monkeypatch.setattr(process, "quota", lambda root: None)
    assert session_options(Runtime(spin=True)).get_session_config_entry(spinning) == "1"
    assert session_options().intra_op_num_threads == 0  # as ONNX Runtime chooses
    assert session_options(Runtime(usual=True)).intra_op_num_threads == 0
    monkeypatch.setattr(os, "cpu_count", lambda: MACHINE + 1)
    for kind in (Runtime(), Runtime(usual=True)):  # the second is timed
        assert session_options(kind).intra_op_num_threads == MACHINE
    monkeypatch.setenv("QUARK_THREADS", "1")
    assert session_options(Runtime(spin=True)).intra_op_num_threads == 1
    assert session_options(Runtime(threads=3)).intra_op_num_threads == 3
    assert session_options(Runtime(spin=True)).get_session_config_entry(spinning) == "0"


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_the_memory_of_a_container(file: str, tmp_path: Path) -> None:
    whole = process.memory(tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    for text, expected in (("max", whole), ("1000000", 1_000_000), (str(1 << 62), whole or 1 << 62)):
        (tmp_path / file).write_text(text + "\n")
        assert process.memory(tmp_path) == expected
