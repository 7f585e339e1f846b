"""No command that writes leaves half a file: folders that take none, files that may not grow, two writers at once; and
none leaves anything in the home of its user.

Every command of the command line whose options write is tried; see ``tests.limits``.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import onnx
import pytest
from tests.onnx_flow import models
from tests.test_gate import cases
from tests.test_telemetry import ELSEWHERE, HOMES, OURS

from quark.onnx.explain import KEY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and privileges of Linux")
ROOT = Path(__file__).parents[1]
NAMES = sorted({name for name, _ in cases()})
QUICK = ("onnx compare", "onnx quantize")
TRIALS = ("read_only", "no_folder", "no_growth", "largest", "two_writers")


def process(*words: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python; in an empty home, no variable of a test server switches telemetry off."""
    kept = {name: value for name, value in os.environ.items() if home is None or name not in (*ELSEWHERE, *OURS)}
    homes = {} if home is None else dict.fromkeys(HOMES, str(home))
    environment = {**kept, **homes, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    call = [sys.executable, "-W", "ignore", *words]
    return subprocess.run(call, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1200)


def check(folder: Path, trials: tuple[str, ...], *names: str) -> None:
    home = folder / "home"
    home.mkdir()
    done = process("-m", "tests.limits", str(folder / "work"), ",".join(trials), *names, home=home)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == {}
    assert [str(path) for path in home.rglob("*") if path.is_file()] == []  # as the database of a telemetry


def test_commands_leave_nothing_half_written(tmp_path: Path) -> None:
    check(tmp_path, tuple(one for one in TRIALS if one != "no_growth"), *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_command_leaves_nothing_half_written(name: str, tmp_path: Path) -> None:
    if name.startswith("torch"):
        pytest.importorskip("transformers")
    check(tmp_path, TRIALS, name)


LITTLE_MEMORY = """
import resource, sys
import onnxruntime, quark.onnx.explain
from quark.cli import main
pages = int(open("/proc/self/statm").read().split()[0])
size = pages * resource.getpagesize() + (640 << 20)
resource.setrlimit(resource.RLIMIT_AS, (size, size))
sys.exit(main(["onnx", "explain", *sys.argv[1:]]))
"""


def test_packed_decisions_of_gigabytes_are_refused_in_little_memory(tmp_path: Path) -> None:
    """4 GiB of decisions in some megabytes: whoever unpacks them all, or copies them often, runs out of memory."""
    packer = zlib.compressobj(9)
    head = packer.compress(b"[") + packer.flush(zlib.Z_FULL_FLUSH)
    part = packer.compress(b"0," * (1 << 23)) + packer.flush(zlib.Z_FULL_FLUSH)  # needs nothing before it
    proto = models.cnn()
    proto.metadata_props.add(key=KEY, value=base64.b64encode(head + part * 256 + packer.flush()).decode())
    onnx.save(proto, tmp_path / "m.onnx")
    done = process("-c", LITTLE_MEMORY, str(tmp_path / "m.onnx"), "x")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert "decisions" in done.stderr and done.stderr.count("error: ") == 1
