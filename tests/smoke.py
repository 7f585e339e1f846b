"""The built package in clean environments: ``python -m build``, then ``python tests/smoke.py install|matrix``.

    install    the wheel and the extra `onnx` into an environment of this Python, with the newest dependencies
    matrix     the same for every Python that is here (3.11 to 3.14), wheel and source distribution, and with the lowest
               versions that pyproject.toml allows; a Python that is not here is named and skipped

In each environment: `quark doctor`, the demonstration (which quantizes its model three ways and runs the results), and
an import of the package from another folder than this one. Ends with 1 where one of them fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SELF = "import sys; print(sys.executable)"
CODE = """
import json, pathlib, quark, quark.onnx
home = pathlib.Path(quark.__file__).parent
assert (home / "py.typed").exists() and "site-packages" in str(home), home
from quark.demo.data import model_path
assert pathlib.Path(model_path()).exists()
"""


def lowest() -> list[str]:
    """Lower bounds of what the extra `onnx` needs, as exact versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [need.replace(">=", "==") for need in project["dependencies"] + project["optional-dependencies"]["onnx"]]


def places(version: str) -> Iterator[str]:
    """Programs that may be this Python: on the path, of pyenv, of uv, of Windows' launcher."""
    yield shutil.which(f"python{version}") or ""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    yield from (str(place) for place in sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True))
    for command in (["uv", "python", "find", "--no-project", version], ["py", f"-{version}", "-c", SELF]):
        if shutil.which(command[0]):
            yield subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def runs(program: str, version: str) -> bool:
    """Whether the program is this Python and can make environments (a shim of pyenv may stand for none)."""
    test = f"import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    return bool(program) and subprocess.run([program, "-c", test], capture_output=True, check=False).returncode == 0


def interpreters() -> Iterator[tuple[str, str]]:
    """Name and path of every Python of the list that runs here."""
    for version in PYTHONS:
        program = next((place for place in places(version) if runs(place, version)), None)
        if program:
            yield version, program
        else:
            print(f"skipped: Python {version} is not here", flush=True)


def tried(python: str, package: Path, pins: list[str]) -> str:
    """What went wrong with the package in a clean environment; empty where nothing did."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        scripts = environment / ("Scripts" if os.name == "nt" else "bin")
        program = str(scripts / "python")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        for command in (
            [python, "-m", "venv", str(environment)],
            [program, "-m", "pip", "install", "--quiet", f"{package}[onnx]", *pins],
            [program, "-c", CODE],
            [str(scripts / "quark"), "doctor"],
            [program, "-m", "quark", "presets"],
            [program, "-m", "quark.demo"],
        ):
            done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"{' '.join(command[1:4])}: {(done.stderr or done.stdout).strip()[-600:]}"
    return ""


def main() -> int:
    """Try what was asked for."""
    (wheel,), (source,) = sorted((ROOT / "dist").glob("*.whl")), sorted((ROOT / "dist").glob("*.tar.gz"))
    jobs = [("this Python, newest", sys.executable, wheel, list[str]())]
    if sys.argv[1:] == ["matrix"]:
        found = list(interpreters())
        jobs = [(f"Python {version}, newest", program, wheel, []) for version, program in found]
        jobs.append(("source distribution", sys.executable, source, []))
        jobs += [(f"Python {version}, lowest", program, wheel, lowest()) for version, program in found[:1]]
    bad = 0
    for name, python, package, pins in jobs:
        fault = tried(python, package, pins)
        bad += bool(fault)
        print(f"{name}: {fault or 'works'}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
