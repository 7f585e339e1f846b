"""``quark doctor``: what this installation and this machine can do, and what is missing for what."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quark import __version__
from quark.cli.output import print_json, say, show
from quark.report import Table
from quark.versions import numbers

#: Extra -> what it is for.
EXTRAS = {
    "onnx": "quantize ONNX models (`quark onnx`, `quark auto`)",
    "torch": "quantize PyTorch models (`quark torch`)",
    "vision": "images as samples",
    "audio": "sound files of other kinds than WAV as samples",
    "export": "write compressed-tensors and GGUF",
    "search": "mixed precision, sensitivities",
    "genai": "run exported language models with onnxruntime-genai",
    "crypto": "encrypt models while they are worked on",
    "docs": "build the documentation site",
}
#: Instruction set -> its flags on Linux, its key on macOS, and what it speeds up.
INSTRUCTIONS = {
    "AVX2": (("avx2",), "hw.optional.avx2_0", "integer and float kernels"),
    "AVX-512": (("avx512f",), "hw.optional.avx512f", "integer and float kernels"),
    "VNNI": (("avx512_vnni", "avx_vnni"), "", "int8 kernels without overflow: without it, 7-bit weights are safer"),
    "AMX int8": (("amx_int8",), "", "int8 matrices"),
    "AMX BF16": (("amx_bf16",), "", "bfloat16 matrices"),
    "AVX-512 BF16": (("avx512_bf16",), "", "bfloat16 matrices"),
    "dot product (ARM)": (("asimddp",), "hw.optional.arm.FEAT_DotProd", "int8 kernels"),
    "int8 matrices (ARM)": (("i8mm",), "hw.optional.arm.FEAT_I8MM", "int8 matrices"),
    "BF16 (ARM)": (("bf16",), "hw.optional.arm.FEAT_BF16", "bfloat16 matrices"),
}
MODULES = {"PIL": "pillow", "google": "protobuf"}  # whose package has another name
_NEED = re.compile(r"^(?P<name>[\w.-]+)(?:\[[^]]*\])?\s*(?:>=(?P<least>[\w.]+))?.*extra == ['\"](?P<extra>\w+)['\"]")


def run(json: bool) -> None:
    """Print what is there."""
    found: dict[str, Any] = {
        "quark": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": {"cores": os.cpu_count(), "usable": usable_cores(), **thread_limits()},
        "instructions": instruction_sets(),
        "providers": providers(),
        "accelerators": accelerators(),
        "extras": extras(),
    }
    if json:
        print_json(found)
        return
    show(Table("This machine", ("", ""), tuple(_machine_rows(found))))
    rows = tuple((name, _state(lacks), EXTRAS[name]) for name, lacks in found["extras"].items())
    show(Table("What is installed", ("extra", "state", "for"), rows))
    lacking = [name for name, lacks in found["extras"].items() if lacks]
    remedy = f"in the folder of the sources, `pip install '.[{','.join(lacking)}]'` adds what is missing"
    start = "`quark onnx quantize model.onnx -o quantized.onnx --data samples/`"
    say(f"next: {remedy if lacking else start}")


def _state(lacks: list[str]) -> str:
    return f"missing: {', '.join(lacks)}" if lacks else "ready"


def _machine_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    sets = found["instructions"]
    threads = ", ".join(f"{name} {value}" for name, value in found["threads"].items())
    known = [f"{name} ({INSTRUCTIONS[name][2]})" for name, there in (sets or {}).items() if there]
    return [
        ("quark", f"{found['quark']}, Python {found['python']}, {found['system']}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages().items())),
        ("threads", threads),
        ("instruction sets", "this system does not tell" if sets is None else "; ".join(known) or "none of ours"),
        ("ONNX Runtime's providers", ", ".join(found["providers"]) or "onnxruntime is not installed"),
        ("accelerators of torch", ", ".join(found["accelerators"]) or "none"),
    ]


def usable_cores() -> int | None:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def thread_limits() -> dict[str, str]:
    """Variables that limit threads, as they are set."""
    return {name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ}


def instruction_sets() -> dict[str, bool] | None:
    """Which instruction sets of the table this processor has; None where the system does not tell."""
    if sys.platform == "darwin":
        keys = [key for _, key, _ in INSTRUCTIONS.values() if key]
        done = subprocess.run(["sysctl", *keys], capture_output=True, text=True, check=False)
        on = set(re.findall(r"^(\S+): 1$", done.stdout, re.MULTILINE))
        return {name: key in on for name, (_, key, _) in INSTRUCTIONS.items()}
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return None
    flags = set(re.findall(r"^(?:flags|Features)\s*:\s*(.*)$", info.read_text(encoding="utf-8"), re.MULTILINE))
    words = {word for line in flags for word in line.split()}
    return {name: any(flag in words for flag in names) for name, (names, _, _) in INSTRUCTIONS.items()}


def providers() -> list[str]:
    """ONNX Runtime's execution providers; empty where it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return []
    return list(onnxruntime.get_available_providers())


def accelerators() -> list[str]:
    """Names of the devices that torch can use beside the CPU; empty where torch is not installed."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def packages() -> dict[str, str]:
    """Versions of what figures and files depend on, of those that are installed."""
    names = ("numpy", "onnx", "onnxruntime", "onnx-ir", "onnxscript", "torch", "transformers")
    return {name: found for name in names if (found := version_of(name)) is not None}


def extras() -> dict[str, list[str]]:
    """For every extra of the table, the packages that it lacks, or that are older than it needs."""
    needs = [match for text in importlib.metadata.requires("openquark") or () if (match := _NEED.match(text))]
    known = importlib.metadata.metadata("openquark").get_all("Provides-Extra") or []
    lacks: dict[str, list[str]] = {name: [] for name in EXTRAS if name in known}
    for need in needs:
        name, least, extra = need["name"], need["least"], need["extra"]
        if extra not in lacks or name == "openquark":
            continue
        found = version_of(name)
        if found is None:
            lacks[extra].append(name)
        elif least and numbers(found) < numbers(least):
            lacks[extra].append(f"{name}>={least} (here {found})")
    return lacks


def remedy_for(module: str, words: Sequence[str], there: bool = False) -> str | None:
    """What to install where a command found a module or a name in it missing; None where no extra has what helps.

    Args:
        module: the name of the module, such as "onnx.helper".
        words: of the command, whose group is the name of an extra.
        there: the module is there, and lacks a name, as one does that is too old.
    """
    package = MODULES.get(top := module.partition(".")[0], top.replace("_", "-"))
    needs = [match for text in importlib.metadata.requires("openquark") or () if (match := _NEED.match(text))]
    least = {need["extra"]: need["least"] for need in needs if need["name"] == package}
    found = [extra for extra in (*EXTRAS, "all") if extra in least]
    here = version_of(package)
    old = bool(found and here) and numbers(here or "") < numbers(least[found[0]] or "")
    if not found or (there and not old):
        return None
    extra = next((word for word in words[:1] if word in found), found[0])
    lacks = (
        f"{package} {least[extra]} or newer, and {here} is installed" if old else f"{package}, which is not installed"
    )
    return (
        f"this needs the package {lacks}: in the folder of the sources, "
        f"`pip install '.[{extra}]'`; `quark doctor` lists what else is missing"
    )


def version_of(name: str) -> str | None:
    """The version of an installed distribution; None where it is absent."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
