"""What `quark doctor` finds on other systems, with and without devices, and for packages that lack or are too old."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest

from quark.cli import doctor

Patch = pytest.MonkeyPatch
NEEDS = {  # what an extra asks for, and the version that is there
    "numpy>=2": "1.0",
    "old>=2.10; extra == 'torch'": "2.9",
    "absent; extra == 'torch'": None,
    "any; extra == 'torch'": "0.1",
    "both-kinds>=2.0; extra == 'onnx'": "2.0",
    "both-kinds>=2.0; extra == 'torch'": "2.0",
    "openquark[torch]; extra == 'onnx'": None,
    "tool; extra == 'dev'": None,
    "early; extra == 'vision'": None,
}


@pytest.fixture
def needs(monkeypatch: Patch) -> None:
    told = Message()
    for extra in ("torch", "onnx", "dev"):
        told["Provides-Extra"] = extra
    there = {text.split(";")[0].split(">")[0].split("[")[0]: version for text, version in NEEDS.items()}
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: list(NEEDS))
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: told)
    monkeypatch.setattr(doctor, "version_of", there.get)


def test_linux_tells_in_a_file(monkeypatch: Patch, tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(doctor, "Path", lambda path: file)
    assert doctor.instruction_sets() is None
    file.write_text("flags\t\t: fpu avx2 avx_vnni\nbugs : amx_int8\nFeatures : asimddp\n")
    assert {name for name, there in (doctor.instruction_sets() or {}).items() if there} == {
        *("AVX2", "VNNI", "dot product (ARM)")
    }


def test_macos_tells_by_a_program(monkeypatch: Patch) -> None:
    def ran(words: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert words[0] == "sysctl" and all(words)
        assert options == {"capture_output": True, "text": True, "check": False}
        told = "hw.optional.avx2_0: 1\nhw.optional.avx512f: 0\nhw.optional.arm.FEAT_I8MM: 1\n"
        return subprocess.CompletedProcess(words, 1, told)  # it fails for keys of other processors

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", ran)
    found = doctor.instruction_sets() or {}
    assert list(found) == list(doctor.INSTRUCTIONS)
    assert {name for name, there in found.items() if there} == {"AVX2", "int8 matrices (ARM)"}


def test_devices_are_those_of_the_packages_that_are_there(monkeypatch: Patch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", "card {}".format)
    for available, names in ((True, ["card 0", "card 1"]), (False, [])):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)  # noqa: B023
        assert doctor.accelerators() == names
    for name, found in (("torch", doctor.accelerators), ("onnxruntime", doctor.providers)):
        monkeypatch.setitem(sys.modules, name, None)
        assert found() == []


def test_cores_and_threads(monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 2, 3} if process == 0 else {1}, raising=False)
    assert doctor.usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert doctor.usable_cores() == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    assert doctor.thread_limits() == {"OMP_NUM_THREADS": "7"}


@pytest.mark.parametrize(
    ("sets", "providers", "accelerators", "expected"),
    [
        (None, [], [], ("this system does not tell", "onnxruntime is not installed", "none")),
        ({"AVX2": False}, ["A", "B"], ["C", "D"], ("none of ours", "A, B", "C, D")),
        ({"AVX2": True, "VNNI": False}, ["A"], ["C"], ("AVX2 (integer and float kernels)", "A", "C")),
    ],
)
def test_rows(
    sets: dict[str, bool] | None, providers: list[str], accelerators: list[str], expected: tuple[str, ...]
) -> None:
    words = {"quark": "1", "python": "3", "system": "S", "threads": {"cores": 2, "usable": 1}}
    rows = dict(
        doctor._machine_rows({**words, "instructions": sets, "providers": providers, "accelerators": accelerators})
    )
    told = ("instruction sets", "ONNX Runtime's providers", "accelerators of torch")
    assert tuple(rows[name] for name in told) == expected and rows["threads"] == "cores 2, usable 1"


@pytest.mark.usefixtures("needs")
def test_what_an_extra_lacks() -> None:
    assert doctor.extras() == {"onnx": [], "torch": ["old>=2.10 (here 2.9)", "absent"]}
    assert doctor.packages() == {"numpy": "1.0"}


@pytest.mark.usefixtures("needs")
@pytest.mark.parametrize(
    ("module", "words", "extra"),
    [
        ("both_kinds.part", ["torch", "quantize"], "torch"),
        ("both_kinds", ["onnx", "torch"], "onnx"),
        ("both_kinds", ["auto", "torch"], "onnx"),
        ("both_kinds", [], "onnx"),
        ("absent", ["onnx"], "torch"),
        ("tool", ["dev"], ""),
        ("numpy", [], ""),
    ],
)
def test_the_remedy_is_the_extra_of_the_command(module: str, words: list[str], extra: str) -> None:
    told = doctor.remedy_for(module, words)
    assert told is None if not extra else f"'.[{extra}]'" in str(told)


@pytest.mark.parametrize(
    ("lacks", "told"), [([], "next: `quark onnx quantize"), (["a"], "next: in the folder of the sources, `pip")]
)
def test_what_comes_next(lacks: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: Patch) -> None:
    monkeypatch.setattr(doctor, "extras", lambda: {"vision": [], "torch": lacks})
    doctor.run(json=False)
    out, err = capsys.readouterr()
    assert err.startswith(told) and ("'.[torch]'" in err) is bool(lacks)
    assert ("missing: a" in out) is bool(lacks) and "ready" in out
