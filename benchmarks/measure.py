"""Run jobs in processes of their own and lay out what they measured.

Memory can only be told apart between processes: a job's peak includes its imports and nothing of ours. Timings are
compared only within one run on one machine, interleaved, by their medians.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ANSI = re.compile(r"\x1b\[[0-9;]*m")
EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Fail|Exit|Interrupt|NotImplemented)\b")
JOB_MEMORY = 12 * 10**9
PACKAGES = ("openquark", "numpy", "onnx", "onnx-ir", "onnxruntime")


@dataclass(frozen=True)
class Outcome:
    """What one job came to.

    Attributes:
        seconds: wall time of the measured call.
        cpu_seconds: processor time of all its threads.
        import_seconds: wall time of importing the package before it.
        process_seconds: wall time of the whole process.
        peak_gb: most memory ever resident, in units of 1e9 bytes, imports included.
        result: everything the job wrote.
        error: why it failed, in one line; None when it did not.
    """

    seconds: float = float("nan")
    cpu_seconds: float = float("nan")
    import_seconds: float = float("nan")
    process_seconds: float = float("nan")
    peak_gb: float = float("nan")
    result: dict[str, Any] | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the job ended well."""
        return self.error is None


def job_environment(python: str) -> dict[str, str]:
    """The environment of a job: this repository's jobs importable, and our package only for our own interpreter.

    Another environment's scripts (a peer builds parts of itself with `ninja`) come first on its PATH.
    """
    environment = dict(os.environ)
    inherited = environment.pop("PYTHONPATH", None) if python != sys.executable else environment.get("PYTHONPATH")
    paths = [str(ROOT)] + ([inherited] if inherited and python == sys.executable else [])
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["PATH"] = os.pathsep.join([str(Path(python).parent), environment.get("PATH", "")])
    return environment


def limit_memory() -> None:
    """End a job that asks for more than JOB_MEMORY bytes of addresses, before the system ends someone else's."""
    resource.setrlimit(resource.RLIMIT_AS, (JOB_MEMORY, JOB_MEMORY))


def run_job(module: str, job: dict[str, Any], python: str = sys.executable, timeout: float = 1800) -> Outcome:
    """Run `benchmarks.peers.<module>` on a job in a fresh process and an empty working folder.

    Args:
        module: name of the job's module.
        job: its JSON input; an "output" named there must exist afterwards.
        python: the interpreter.
        timeout: seconds before it is ended and counted as failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        task, answer = Path(folder, "job.json"), Path(folder, "result.json")
        task.write_text(json.dumps(job))
        command = [python, "-m", f"benchmarks.peers.{module}", str(task), str(answer)]
        start = time.perf_counter()
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=job_environment(python),
                capture_output=True,
                text=True,
                timeout=timeout,
                preexec_fn=limit_memory,
            )
        except subprocess.TimeoutExpired:
            return Outcome(error=f"no result after {timeout:.0f} s")
        elapsed = time.perf_counter() - start
        if done.returncode or not answer.exists():
            return Outcome(process_seconds=elapsed, error=reason(done))
        result = json.loads(answer.read_text())
        if "output" in job and not Path(job["output"]).exists():
            return Outcome(process_seconds=elapsed, result=result, error="no file written: " + last_error(done))
    return Outcome(
        seconds=result.get("seconds", float("nan")),
        cpu_seconds=result.get("cpu_seconds", float("nan")),
        import_seconds=result.get("import_seconds", float("nan")),
        process_seconds=elapsed,
        peak_gb=result["peak_bytes"] / 1e9,
        result=result,
    )


def reason(done: subprocess.CompletedProcess[str]) -> str:
    """Why a process failed: the last exception that it names, or the signal or status that ended it."""
    lines = [ANSI.sub("", line).strip() for line in done.stderr.splitlines()]
    named = [line for line in lines if EXCEPTION.match(line)]
    if named:
        return named[-1][:300]
    if done.returncode < 0:
        return f"ended by signal {signal.Signals(-done.returncode).name}"
    return f"exit status {done.returncode}"


def last_error(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of a log that calls itself an error."""
    lines = [ANSI.sub("", line).strip() for line in (done.stdout + done.stderr).splitlines()]
    return next((line for line in reversed(lines) if "ERROR" in line.upper()), "no reason given")[:300]


def middle(outcomes: Sequence[Outcome]) -> Outcome:
    """Repeats of one job as one: the median of each time, the largest peak; a failure stands for all."""
    failed = next((outcome for outcome in outcomes if not outcome.ok), None)
    if failed is not None:
        return failed
    return Outcome(
        seconds=statistics.median(outcome.seconds for outcome in outcomes),
        cpu_seconds=statistics.median(outcome.cpu_seconds for outcome in outcomes),
        import_seconds=statistics.median(outcome.import_seconds for outcome in outcomes),
        process_seconds=statistics.median(outcome.process_seconds for outcome in outcomes),
        peak_gb=max(outcome.peak_gb for outcome in outcomes),
        result=outcomes[-1].result,
    )


def machine() -> dict[str, Any]:
    """The processor, its cores that we may use, the memory and the versions that figures depend on."""
    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "date": time.strftime("%Y-%m-%d"),
    }


def processor_name() -> str:
    """Model name of the CPU, with the instruction sets that integer kernels use."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = dict(re.findall(r"^(model name|flags)\s*:\s*(.*)$", text, re.MULTILINE))
    sets = [name for name in ("avx2", "avx512_vnni", "avx_vnni", "amx_int8") if name in found.get("flags", "").split()]
    return f"{found.get('model name', platform.processor())} ({', '.join(sets)})"


def package_version(name: str) -> str:
    """Version of an installed distribution, or "absent"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def machine_line(values: dict[str, Any]) -> str:
    """`machine()` in one sentence."""
    packages = ", ".join(f"{name} {number}" for name, number in values["packages"].items())
    return (
        f"{values['date']}; {values['processor']}, {values['cores']} cores, {values['memory_gb']} GB; "
        f"{values['system']}; Python {values['python']}; {packages}"
    )


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns line up."""
    body = [list(headers), *[list(row) for row in rows]]
    widths = [max(len(row[k]) for row in body) for k in range(len(headers))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in body
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def as_json(outcome: Outcome) -> dict[str, Any]:
    """An outcome as plain values; what was not measured is null, since JSON has no NaN."""
    return {key: None if value != value else value for key, value in asdict(outcome).items()}
