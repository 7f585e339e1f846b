"""What an extra promises works without the packages of the others, and what lacks one says so in a sentence."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quark.cli import main
from quark.cli.doctor import remedy_for

transformers = pytest.importorskip("transformers")
OTHERS = ("onnx", "onnx_ir", "onnxruntime", "onnxscript", "onnxslim", "compressed_tensors", "gguf", "scipy")
SCRIPT = """
import sys
for name in {blocked}:
    sys.modules[name] = None  # as if it were not installed
from quark.cli import main
given = [{source!r}, "--scheme", "int4_wo_32"]
for command, more in (("quantize", []), ("quantize-files", []), ("quantize", ["--format", "onnx"]),
                      ("quantize", ["--format", "compressed-tensors"]), ("quantize", ["--for", "llama.cpp"])):
    output = {source!r} + "-" + command + "".join(more)
    print("code", main(["torch", command, *given, "-o", output, *more]), flush=True)
"""


def test_pytorch_needs_no_package_of_another_extra(tmp_path: Path) -> None:
    size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, num_attention_heads=4))
    made.save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")  # a GGUF file needs one
    script = SCRIPT.format(blocked=OTHERS, source=str(tmp_path / "m"))
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert [line for line in ran.stdout.splitlines() if line.startswith("code")] == ["code 0"] * 2 + ["code 1"] * 3
    assert "Traceback" not in ran.stderr
    told = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert ["onnx" in told[0], "compressed" in told[1], "gguf" in told[2]] == [True] * 3, told
    assert all("pip install '.[" in line for line in told)


def test_every_package_of_an_extra_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark.cli.doctor.version_of", lambda name: None)
    needs: dict[str, set[str]] = {}
    for text in importlib.metadata.requires("openquark") or ():
        if (found := re.match(r"([\w.-]+).*extra == ['\"](\w+)", text)) and found[1] != "openquark":
            needs.setdefault(found[1], set()).add(found[2])
    assert len(needs) > 15
    for package, extras in needs.items():
        told = remedy_for({"pillow": "PIL", "protobuf": "google"}.get(package, package.replace("-", "_")), ["onnx"])
        assert told is None if extras <= {"dev"} else re.findall(r"'\.\[(\w+)\]'", told)[0] in extras, package
    for module, extra in {
        "onnx.helper": "onnx",
        "joblib": "onnx",
        "PIL.Image": "vision",
        "transformers": "all",
    }.items():
        assert f"'.[{extra}]'" in (remedy_for(module, ["onnx"]) or "")
    assert remedy_for("quark.nowhere", ["onnx"]) is None


@pytest.mark.parametrize(
    ("module", "here", "told"),
    [
        (
            "compressed_tensors.quantization.lifecycle",
            "0.1.0.1",
            r"compressed-tensors 0\.\d+ or newer, and 0.1.0.1 is",
        ),
        ("gguf", "0.9", r"gguf 0\.\d+ or newer, and 0.9 is installed"),
        ("onnx.helper", "1.2", r"onnx 1\.\d+ or newer, and 1.2 is installed"),
        ("onnx.helper", "99", None),
    ],
)
def test_a_package_that_is_too_old_is_told(
    module: str, here: str, told: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(words: list[str]) -> None:
        raise ImportError(f"cannot import name 'new' from {module!r}", name=module)

    monkeypatch.setattr("quark.cli._called", broken)
    monkeypatch.setattr("quark.cli.doctor.version_of", lambda name: here)
    if told is None:  # a name that it should have: a defect, which shows itself
        with pytest.raises(ImportError):
            main(["doctor"])
        return
    assert main(["doctor"]) == 1
    assert re.search(told, capsys.readouterr().err)


def test_a_module_that_is_ours_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(words: list[str]) -> None:
        raise ModuleNotFoundError("No module named 'quark.nowhere'", name="quark.nowhere")

    monkeypatch.setattr("quark.cli._called", broken)
    with pytest.raises(ModuleNotFoundError):
        main(["doctor"])
