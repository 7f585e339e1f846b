"""Ray and Dask themselves, on workers of this machine: every flow with workers gives what a serial run gives.

    pip install ray && pytest -m slow tests/test_clusters.py

Ray is skipped where it is not installed; ``test_parallel.py`` has stand-ins for what is special about both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import joblib
import onnx
import pytest
import torch
import transformers
from tests.onnx_flow import models
from typer.testing import CliRunner

from quark import parallel
from quark.cli.app import app
from quark.errors import ConfigError, QuarkError

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 64}
TOKENS = "\n".join(json.dumps({"input_ids": [(7 * row + k) % 64 for k in range(16)]}) for row in range(4))
DATA = ("--data", "tokens.jsonl")
SCHEME = ("--scheme", "int4_wo_32")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clusters")
    onnx.save(models.cnn(), folder / "cnn.onnx")
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=4)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder / "llama", max_shard_size="60KB")
    (folder / "tokens.jsonl").write_text(TOKENS)
    (folder / "scratch").mkdir()
    return folder


def quark(folder: Path, *words: str) -> str:
    """What a command says, in this process: it starts no other, and leaves joblib as it was."""
    with pytest.MonkeyPatch.context() as here, joblib.parallel_config("threading", n_jobs=1):
        here.chdir(folder)
        done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def quark_by_itself(folder: Path, *words: str) -> str:
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "quark", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def told(text: str) -> Any:
    """What ``--json`` said, without times."""
    found = json.loads(text)
    return {key: value for key, value in found.items() if "seconds" not in key}


@pytest.fixture
def dask() -> Iterator[None]:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster),
    ):
        yield


@pytest.mark.usefixtures("dask")
def test_every_flow_on_dask_gives_what_a_serial_run_gives(work: Path) -> None:
    compare(work, "dask", quark)


def part(number: int) -> list[torch.Tensor]:
    time.sleep(0.02 * (number % 3))
    return [torch.full((2,), number, dtype=torch.bfloat16)]


def die(number: int) -> None:
    os._exit(9)


@pytest.mark.usefixtures("dask")
def test_dask_gives_every_result_or_an_error() -> None:
    """Of a type that Dask does not write by itself; and of calls that no worker survives, for which joblib waits."""
    with joblib.parallel_config("dask"):
        calls = [parallel.delayed(part, k) for k in range(9)]
        assert [int(found[0]) for (found,) in parallel.results(calls, None)] == list(range(9))
        assert sorted(int(found[0]) for (found,) in parallel.results(calls, 2, ordered=False)) == list(range(9))
        first = parallel.results(calls, 2)
        assert int(next(first)[0][0]) == 0
        first.close()  # type: ignore[attr-defined]  # what was asked for is taken back
        with pytest.raises(QuarkError, match="a worker was killed at its work"):
            list(parallel.results([parallel.delayed(die, k) for k in range(3)], None))


def test_a_scheduler_without_workers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(parallel, "SECONDS", 0.2)
    with (
        distributed.LocalCluster(n_workers=0, dashboard_address=None) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config("dask", wait_for_workers_timeout=0),
        pytest.raises(ConfigError, match="has no worker: start some, `dask worker tcp://"),
    ):
        parallel.count(None, "processes")


@pytest.mark.slow
def test_every_flow_on_ray_gives_what_a_serial_run_gives(work: Path) -> None:
    pytest.importorskip("ray")
    compare(work, "ray", quark_by_itself)


def compare(work: Path, backend: str, there: Callable[..., str]) -> None:
    several = ("--workers", "2", "--backend", backend)

    random = ("onnx", "quantize", "cnn.onnx", "--random", "--samples", "6", "-p", "A8W8", "--no-check", "--overwrite")
    quark(work, *random, "-o", "serial.onnx")
    shared = ("--set", "CalibWorkerNum=2", "--set", f"TmpDir={work / 'scratch'}", "--backend", backend)
    there(work, *random, "-o", "cluster.onnx", *shared)
    assert (work / "cluster.onnx").read_bytes() == (work / "serial.onnx").read_bytes()

    ranked = ("onnx", "sensitivity", "cnn.onnx", "--random", "--samples", "4", "-p", "A8W8", "--json")
    assert told(there(work, *ranked, *several)) == told(quark(work, *ranked))

    files = ("torch", "quantize-files", "llama", *SCHEME)
    quark(work, *files, "-o", f"serial-{backend}")
    there(work, *files, "-o", f"cluster-{backend}", *several)
    for path in sorted((work / f"serial-{backend}").glob("*.safetensors")):
        assert (work / f"cluster-{backend}" / path.name).read_bytes() == path.read_bytes()

    tuned = (*files, *DATA, "--seq-len", "16", "--batch-size", "1", "--algorithm", "gptaq")
    quark(work, *tuned, "-o", f"tuned-{backend}-1")
    there(work, *tuned, "-o", f"tuned-{backend}-2", *several)
    for path in sorted((work / f"tuned-{backend}-1").glob("*.safetensors")):
        assert (work / f"tuned-{backend}-2" / path.name).read_bytes() == path.read_bytes()

    layers = ("torch", "sensitivity", "llama", *SCHEME, *DATA, "--samples", "2", "--seq-len", "16")
    assert told(there(work, *layers, "--json", *several)) == told(quark(work, *layers, "--json"))
