"""Times of kernels as ONNX Runtime's profiler writes them."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime
import pytest
from tests.onnx_flow import models

from quark.config.options import Options
from quark.errors import OutputError
from quark.onnx.kernel_times import kernel_seconds


@pytest.mark.parametrize("kept", [0, 1, 200])
def test_a_profile_that_is_not_whole_is_told(kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, or a limit of a file's size: ONNX Runtime writes what fits, and says nothing."""
    onnx.save(models.cnn(), tmp_path / "m.onnx")
    feed = models.feeds(models.cnn())
    assert kernel_seconds(tmp_path / "m.onnx", feed, Options(), 1)
    whole = onnxruntime.InferenceSession.end_profiling

    def cut(session: onnxruntime.InferenceSession) -> str:
        path = whole(session)
        Path(path).write_bytes(Path(path).read_bytes()[:kept])
        return path

    monkeypatch.setattr(onnxruntime.InferenceSession, "end_profiling", cut)
    with pytest.raises(OutputError, match=rf"profile.*ends after {kept} bytes.*TmpDir"):
        kernel_seconds(tmp_path / "m.onnx", feed, Options(), 1)
