"""Commands under limits of the system: ``python -m tests.limits FOLDER TRIALS COMMAND...``, the last line is JSON.

A process imports everything and forks a child for every trial: a folder that takes no files, a file where the folder
should be, files that may not grow, two children at once. Command lines come from the registry of commands: what an
option reads and writes says what it is given, so that a new command is tried as well.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import quark  # noqa: F401  # isort: skip - before what imports onnxruntime: its telemetry is off
from tests.test_gate import COMMANDS, REQUIRED, state_of

from quark.cli import main
from quark.cli.paths import FOLDER, Reads, Writes, marks_of
from quark.cli.verdicts import FAILED

FIRST_BYTES = 64
#: Of a folder that is written file by file, until all are there.
PROGRESS = "quark_progress.json"
ENDINGS = {"model": ".onnx", "state": ".json", FOLDER: ""}
#: What is read, by flow and parameter; other options that read are left out.
GIVEN = {
    "onnx": {"model": "model.onnx", "quantized": "quantized.onnx", "data": "data.npy"},
    "torch": {"model": "llama", "data": "ids.npy"},
}
MORE = {
    "auto": ["--minutes", "0.02"],
    "onnx search": ["--target", "sqnr>=1", "--candidate", "A16W8", "--preset", "A8W8"],
    "onnx transform": ["--config", "inputs/passes.yaml"],
    "torch search": ["--target", "kl<=9", "--scheme", "int4_wo_32", "--candidate", "int8_wo_per_channel"],
    "torch sensitivity": ["--scheme", "int4_wo_32"],
    "torch plan": ["--scheme", "int4_wo_32"],
    "torch convert": ["--format", "gptq"],
}


def flow(name: str) -> str:
    return "torch" if name.startswith("torch") else "onnx"


def marks(name: str) -> dict[str, Reads | Writes]:
    return marks_of(inspect.unwrap(COMMANDS[name].callback))


def inputs(folder: Path, names: list[str]) -> None:
    """The files that the commands read."""
    import numpy as np

    folder.mkdir()
    if any(flow(name) == "onnx" for name in names):
        import onnx
        from tests.onnx_flow import models

        from quark.onnx import ModelQuantizer, QConfig

        proto = models.conv_chain(2)
        onnx.save(proto, folder / "model.onnx")
        np.save(folder / "data.npy", next(iter(models.feeds(proto).values())))
        (folder / "passes.yaml").write_text("passes: [fold_batch_norm]\n")
        if "onnx compare" in names:
            config = QConfig.get_default_config("A8W8")
            ModelQuantizer(config).quantize_model(proto, folder / "quantized.onnx", [models.feeds(proto)])
    if any(flow(name) == "torch" for name in names):
        from tests.killing import llama

        llama(folder)
        (folder / "llama" / "tokenizer.json").unlink()
        np.save(folder / "ids.npy", np.arange(16, dtype=np.int64).reshape(2, 8) % 8 + 1)
        if "torch convert" in names:
            (folder / "float").mkdir()
            for path in (folder / "llama").iterdir():
                path.rename(folder / "float" / path.name)
            done = child(["torch", "quantize-files", "inputs/float", "-o", "inputs/llama", "--scheme", "int4_wo_32"])
            assert done[0] == 0, done


def typed(name: str) -> list[str]:
    """A whole command line: what it has to read, its samples, and all that it writes, into the folder ``out``."""
    words, found = name.split(), marks(name)
    for parameter in COMMANDS[name].params:
        mark = found.get(parameter.name)
        if isinstance(mark, Writes):
            ending = ".html" if parameter.name == "report" else ENDINGS.get(mark.kind, ".yaml")
            value = f"out/{parameter.name}{ending}"
        elif mark is not None and parameter.name in GIVEN[flow(name)]:
            value = f"inputs/{GIVEN[flow(name)][parameter.name]}"
        else:
            continue
        words += [value] if parameter.param_type_name == "argument" else [parameter.opts[0], value]
    return words + MORE.get(name, REQUIRED.get(name, []))


# ---- children --------------------------------------------------------------------------------------------------------


def start(words: list[str], limit: Callable[[], None] = lambda: None) -> tuple[int, int]:
    """Fork a child that runs a command; its id, and where its standard error can be read."""
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, out
    code = 99
    try:
        os.dup2(into, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        limit()
        code = main(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def end(pid: int, out: int) -> tuple[int, str]:
    with os.fdopen(out, encoding="utf-8", errors="replace") as pipe:
        told = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), told


def child(words: list[str], limit: Callable[[], None] = lambda: None) -> tuple[int, str]:
    return end(*start(words, limit))


def without_privileges() -> None:
    """An owner whom permissions bind, also where the tests run as root."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # the third version, this process
    if ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), "capset")


def files_up_to(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


# ---- trials ----------------------------------------------------------------------------------------------------------


def wrong(done: tuple[int, str], code: int = 1) -> str:
    """What is wrong with the end of a command: empty, or what it told."""
    errors = [line for line in done[1].splitlines() if line.startswith("error: ")]
    right = done[0] == code and "Traceback" not in done[1] and len(errors) == (code == 1)
    return "" if right else f"exit {done[0]}: {done[1][-1500:]}"


def unfinished(done: tuple[int, str]) -> str:
    """What is wrong where a command should write, whether or not the result meets its bound."""
    return wrong(done, FAILED if done[0] == FAILED else 0)


def states(name: str) -> set[str]:
    """Files of jobs that go on, which may stay."""
    return {f"{key}.json" for key, mark in marks(name).items() if isinstance(mark, Writes) and mark.kind == "state"}


def apart(whole: dict[str, bytes]) -> str:
    """How the outputs differ from those of a run that nothing limited: their names, and the bytes of models."""
    left = state_of(Path("out"))
    other = [key for key in whole if key.endswith((".onnx", ".safetensors")) and left.get(key) != whole[key]]
    return "" if set(left) == set(whole) and not other else f"left {sorted(left)}; other bytes in {other}"


def refused(name: str, limit: Callable[[], None]) -> str:
    said = wrong(child(typed(name), limit))
    left = [str(path) for path in Path("out").rglob("*") if path.is_file() or path.name.startswith(".")]
    return said or (f"left {left}" if left else "")


def read_only(name: str, whole: dict[str, bytes]) -> str:
    Path("out").chmod(0o555)
    return refused(name, without_privileges)


def no_folder(name: str, whole: dict[str, bytes]) -> str:
    Path("out").rmdir()
    Path("out").write_text("mine")
    said = refused(name, lambda: None)
    return said or ("" if Path("out").read_text() == "mine" else "the file was replaced")


def no_growth(name: str, whole: dict[str, bytes]) -> str:
    return refused(name, files_up_to(FIRST_BYTES))


#: What stays where only the page about it cannot be written: a model takes hours, and what judges it seconds.
FINISHED = {"onnx quantize": {"output.onnx", "plan.yaml"}}


def largest(name: str, whole: dict[str, bytes]) -> str:
    """The largest file cannot be written, most others can; what stays then is a job that goes on to the same bytes."""
    size = max(len(content) for key, content in whole.items() if key not in states(name))
    said = wrong(child(typed(name), files_up_to(size * 3 // 4)))  # pages vary by the times that they tell
    left = set(state_of(Path("out")))
    if said or not left:
        return said
    if left == FINISHED.get(name):
        model = Path("out", "output.onnx").read_bytes()
        return "" if model == whole["output.onnx"] else "the model that stays is another"
    if not any(Path(key).name in (*states(name), PROGRESS) for key in left):
        return f"left {sorted(left)}"
    return unfinished(child(typed(name))) or apart(whole)


def two_writers(name: str, whole: dict[str, bytes]) -> str:
    done = [end(*one) for one in [start(typed(name)), start(typed(name))]]
    said = " / ".join(filter(None, (wrong(one) if one[0] == 1 else unfinished(one) for one in done)))
    if said or all(code == 1 for code, _ in done):
        return said or f"nobody wrote: {done}"
    return apart(whole)


TRIALS = {one.__name__: one for one in (read_only, no_folder, no_growth, largest, two_writers)}


def tried(folder: Path, trials: list[str], names: list[str]) -> dict[str, str]:
    """What went wrong, by command and trial; "whole" is the command that nothing limits."""
    found, temporary = {}, folder / "temporary"
    temporary.mkdir(parents=True)
    os.environ |= {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    os.chdir(folder)
    inputs(folder / "inputs", names)
    before = state_of(folder / "inputs")
    for name in names:
        whole: dict[str, bytes] = {}
        for trial in ("whole", *trials):
            place = folder / f"{name} {trial}"
            (place / "out").mkdir(parents=True)
            (place / "inputs").symlink_to(folder / "inputs")
            os.chdir(place)
            if trial == "whole":
                done = child(typed(name))
                said = unfinished(done)
                whole = state_of(place / "out")
                written = {key.split("/")[0].split(".")[0] for key in whole}
                missing = [key for key, mark in marks(name).items() if isinstance(mark, Writes) and key not in written]
                said = said or (f"{missing} not written: {sorted(whole)}" if missing else "")
            else:
                said = TRIALS[trial](name, whole)
            said = said or ("an input has changed" if state_of(folder / "inputs") != before else "")
            stray = [str(path) for path in place.iterdir() if path.name not in ("out", "inputs")]
            stray += [str(path) for path in temporary.rglob("*")]
            said = said or (f"left behind {stray}" if stray else "")
            if said:
                found[f"{name}: {trial}"] = said
            if trial == "whole" and said:
                break
    return found


def imported(names: list[str]) -> None:
    """Import what children use, before the forks."""
    if any(flow(name) == "onnx" for name in names):
        import onnxruntime  # noqa: F401

        import quark.onnx  # noqa: F401
    if any(flow(name) == "torch" for name in names):
        import torch
        import transformers  # noqa: F401

        torch.set_num_threads(1)


if __name__ == "__main__":
    imported(sys.argv[3:])
    print(json.dumps(tried(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])), flush=True)
