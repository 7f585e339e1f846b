"""Jobs that are killed at random moments and go on: ``python -m tests.killing FOLDER SEED JOB=COUNT...``.

A process imports everything and forks one child a run. A child counts what it asks of the disk (renames, and content
brought there); at the moment that the seed draws, it ends by SIGKILL. In half of the runs the machine loses its power
too: the file that was being written is cut to half its length, or the last one that was renamed is.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

Job = Callable[[Path], None]


class Disk:
    """Counts the moments of a run, and ends it at one of them."""

    def __init__(self, moment: int, cut: str) -> None:
        self.count, self.moment, self.cut = 0, moment, cut
        self.last: str | None = None
        self.replace, self.sync = os.replace, os.fsync

    def watch(self) -> None:
        os.replace, os.fsync = self.replaced, self.synced  # type: ignore[assignment]

    def event(self, writing: str | None = None) -> None:
        self.count += 1
        if self.count - 1 != self.moment:
            return
        victim = writing if self.cut == "writing" else self.last if self.cut == "renamed" else None
        if victim is not None and os.path.isfile(victim):
            os.truncate(victim, os.path.getsize(victim) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    def replaced(self, source: Any, goal: Any) -> None:
        self.event(os.fspath(source))
        self.replace(source, goal)
        self.last = os.fspath(goal)
        self.event()

    def synced(self, handle: int) -> None:
        name = os.readlink(f"/proc/self/fd/{handle}")
        self.event(name)
        self.sync(handle)


def child(job: Job, folder: Path, moment: int = -1, cut: str = "") -> tuple[int, int]:
    """Run a job in a process of its own: its exit code, and the moments that it had."""
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        disk = Disk(moment, cut)
        disk.watch()
        try:
            job(folder)
            os.write(into, str(disk.count).encode())
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    os.close(into)
    with os.fdopen(out) as pipe:
        count = int(pipe.read() or 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), count


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the mark of an empty folder of drafts, which the next run that writes there takes away."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".alive")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def trials(job: Job, folder: Path, seed: int, count: int) -> dict[str, Any]:
    """Kill a job ``count`` times, each time in a new folder, and let it go on; which did not end as a whole one."""
    draw = random.Random(seed)
    whole = folder / "whole"
    whole.mkdir()
    code, moments = child(job, whole)
    assert code == 0 and moments > 0, "the job itself fails"
    wanted, wrong = contents(whole / "out"), []
    for number in range(count):
        moment, cut = draw.randrange(moments), draw.choice(["", "", "writing", "renamed"])
        place = folder / str(number)
        place.mkdir()
        killed, _ = child(job, place, moment, cut)
        unfinished = contents(place)
        ended, again = child(job, place)
        if killed != -signal.SIGKILL or ended != 0 or contents(place / "out") != wanted or again > 2 * moments + 4:
            wrong.append([moment, cut, killed, ended, sorted(unfinished), sorted(contents(place))])
        shutil.rmtree(place)
    return {"moments": moments, "kills": count, "wrong": wrong}


# ---- jobs, each of which writes to folder/out ------------------------------------------------------------------------


def onnx_job(options: dict[str, Any], algorithms: Callable[[], list[Any]]) -> Job:
    from tests.onnx_flow import models
    from tests.onnx_flow.test_resume_kills import GRAPH, WEIGHTS

    from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig

    proto = models.model(GRAPH, WEIGHTS)
    samples = [models.feeds(proto, k) for k in range(3)]

    def job(folder: Path) -> None:
        (folder / "out").mkdir(exist_ok=True)
        extra = {"PrintSummary": False, "SaveAndRestore": str(folder / "state.json"), **options}
        layer = QLayerConfig(input_tensors=Int8Spec(calibration_method=CalibMethod.Percentile), weight=Int8Spec())
        config = QConfig(layer, algo_config=algorithms(), extra_options=extra)
        ModelQuantizer(config).quantize_model(proto, folder / "out" / "q.onnx", samples)

    return job


def adaround() -> Job:
    import torch  # noqa: F401 - before the fork

    from quark.onnx import AdaQuantConfig, AdaRoundConfig
    from quark.onnx.algorithms import finetune  # noqa: F401

    settings = {"num_iterations": 4, "batch_size": 1}
    return onnx_job({}, lambda: [AdaRoundConfig(**settings), AdaQuantConfig(**settings)])


def external_data() -> Job:
    """Over an older result, with the weights in a file of their own."""
    inner = onnx_job({}, list)

    def job(folder: Path) -> None:
        from quark.onnx.graph.model import load, save

        inner(folder)
        save(load(folder / "out" / "q.onnx"), folder / "out" / "data.onnx", external_data=True)
        save(load(folder / "out" / "data.onnx"), folder / "out" / "data.onnx", external_data=True)

    return job


def gptq() -> Job:
    from tests.onnx_flow import models

    from quark.onnx import GPTQConfig, Int8Spec, ModelQuantizer, QConfig, QLayerConfig

    graph = "g (float[n, 32] x) => (float[n, 8] y) { [a] h = MatMul(x, w) [r] t = Relu(h) [b] y = MatMul(t, v) }"
    proto = models.model(graph, {"w": models.normal(32, 32), "v": models.normal(32, 8, seed=1)})
    samples = [{"x": models.normal(16, 32, seed=k)} for k in range(3)]

    def job(folder: Path) -> None:
        (folder / "out").mkdir(exist_ok=True)
        extra = {"PrintSummary": False, "SaveAndRestore": str(folder / "state.json")}
        layer = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
        config = QConfig(layer, algo_config=[GPTQConfig()], extra_options=extra)
        ModelQuantizer(config).quantize_model(proto, folder / "out" / "q.onnx", samples)

    return job


def onnx_search() -> Job:
    from tests.onnx_flow import models

    from quark.onnx.search import save_plan, search
    from quark.search.trials import Trying

    proto = models.cnn()
    samples = [models.feeds(proto, k) for k in range(2)]

    def job(folder: Path) -> None:
        (folder / "out").mkdir(exist_ok=True)
        found = search(
            proto, "A8W8", samples, ["A8W8", "A16W8", "float"], "sqnr>=30", Trying(ledger=folder / "ledger.json")
        )
        save_plan(folder / "out" / "plan.yaml", "A8W8", found, "sqnr>=30", "size")

    return job


def onnx_auto() -> Job:
    """The command, with its ledger: presets, recipes, a winner and the recipe file."""
    import tempfile

    import onnx
    from tests.onnx_flow import models

    from quark.cli import main as command

    graph = "g (float[1, 96] x) => (float[1, 96] y) { h = MatMul(x, w) t = Relu(h) y = MatMul(t, v) }"
    proto = models.model(graph, {"w": models.normal(96, 96), "v": models.normal(96, 96, seed=1)})
    given = Path(tempfile.mkdtemp(dir=FOLDER))
    onnx.save(proto, given / "model.onnx")
    np.save(given / "data.npy", np.concatenate([models.feeds(proto, k)["x"] for k in range(8)]))
    words = ["auto", str(given / "model.onnx"), "--data", str(given / "data.npy"), "--for", "size", "--minutes", "60"]
    return commanded(command, words, "q.onnx")


def torch_auto() -> Job:
    """The same for the folder of a torch model."""
    import tempfile

    import torch

    from quark.cli import main as command

    given = llama(Path(tempfile.mkdtemp(dir=FOLDER)))
    (given / "tokenizer.json").unlink()
    np.save(given.parent / "ids.npy", np.arange(128, dtype=np.int64).reshape(16, 8) % 8 + 1)
    words = ["auto", str(given), "--data", str(given.parent / "ids.npy"), "--for", "vllm", "--drop", "0.3"]
    torch.set_num_threads(1)
    return commanded(command, [*words, "--minutes", "60"], "q")


def commanded(command: Callable[[list[str]], int], words: list[str], output: str) -> Job:
    """A command line with an output and a ledger; 3: it tells that nothing is good enough, and writes the nearest."""

    def job(folder: Path) -> None:
        (folder / "out").mkdir(exist_ok=True)
        ledger = ["--ledger", str(folder / "ledger.json"), "-o", str(folder / "out" / output)]
        if (folder / "out" / output).is_dir():  # it is there at the end of all, and is not replaced
            return
        assert command([*words, *ledger]) in (0, 3)

    return job


def llama(folder: Path) -> Path:
    """A language model in several files, made once."""
    import torch
    import transformers
    from tests.torch_flow.test_files import HEADS

    torch.manual_seed(0)
    source = folder / "llama"
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**HEADS, "num_hidden_layers": 2}))
    model.save_pretrained(source, max_shard_size="100KB")
    (source / "tokenizer.json").write_text("{}")
    return source


def torch_files(scheme: str, algorithm: str | None = None) -> Job:
    import tempfile

    import torch
    from tests.torch_flow.test_files import IDS

    from quark.torch import LLMTemplate
    from quark.torch.files import quantize_checkpoint

    source = llama(Path(tempfile.mkdtemp(dir=FOLDER)))
    config = LLMTemplate.get("llama").get_config(scheme, algorithm=algorithm)
    samples = [IDS[:1, :8]] if algorithm or scheme == "fp8" else None
    torch.set_num_threads(1)
    return lambda folder: quantize_checkpoint(source, folder / "out", config, samples=samples)


def torch_command(name: str, *given: str) -> Job:
    """A command that writes a folder: tensors, what lies beside them, and the card."""
    import tempfile

    import torch

    from quark.cli import main as command

    source = llama(Path(tempfile.mkdtemp(dir=FOLDER)))
    (source / "tokenizer.json").unlink()
    (source / "LICENSE").write_text("a licence")
    torch.set_num_threads(1)
    options = list(given)
    if name == "convert":
        assert command(["torch", "quantize-files", str(source), "-o", str(source.parent / "coded"), *SCHEME]) == 0
        source = source.parent / "coded"
    options += SCHEME if name != "convert" and "--gguf-type" not in options else []
    if "--gguf-type" in options:
        vocabulary(source)
    words = ["torch", name, str(source), *options]
    assert command([*words, "-o", str(source.parent / "first")]) == 0  # what it imports is there for every child

    def job(folder: Path) -> None:
        goal = folder / "out" / "q"
        is_whole = any(goal.glob("*.gguf")) or (goal / "config.json").exists()
        if is_whole and not (goal / "quark_progress.json").exists():
            return
        (folder / "out").mkdir(exist_ok=True)
        assert command([*words, "-o", str(goal)]) == 0

    return job


def vocabulary(folder: Path) -> None:
    """A tokenizer of eight words."""
    tokens = {text: number for number, text in enumerate("abcdefgh")}
    model = {"type": "BPE", "vocab": tokens, "merges": []}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    text = json.dumps({"model": model, "pre_tokenizer": level, "decoder": level, "added_tokens": []})
    (folder / "tokenizer.json").write_text(text)


def quantized_before() -> Job:
    """From a GPTQ folder of two files: most layers keep their codes, one kind gets others."""
    import tempfile
    from dataclasses import replace

    import torch
    from tests.torch_flow.export.networks import llama as network
    from tests.torch_flow.export.test_reload import quantized

    from quark.torch import LLMTemplate, export_safetensors
    from quark.torch.files import quantize_checkpoint

    source = Path(tempfile.mkdtemp(dir=FOLDER)) / "gptq"
    template = LLMTemplate.get("llama")
    export_safetensors(quantized(network(), template.get_config("int4_wo_32")), source, "gptq", max_shard_size=30_000)
    other = {"*down_proj": template.get_config("int8_wo_per_channel").global_quant_config}
    config = replace(template.get_config("int4_wo_32"), layer_quant_config=other)
    torch.set_num_threads(1)

    def job(folder: Path) -> None:
        found = quantize_checkpoint(source, folder / "out", config)
        assert found is not None and found.kept > 0 and found.anew > 0 and 0 < found.loss < 0.01

    return job


def export() -> Job:
    from tests.torch_flow.export.test_failures import LLM, language

    from quark.torch import export_safetensors

    model = language(LLM["int4"])

    def job(folder: Path) -> None:
        if not (folder / "out" / "config.json").exists():
            export_safetensors(model, folder / "out", max_shard_size=20_000)

    return job


def exported(name: str) -> Job:
    """An export that appears whole, in one of the forms whose failures are tested."""
    import tempfile

    import torch
    from tests.torch_flow.export.test_failures import EXPORTS

    source = Path(tempfile.mkdtemp(dir=FOLDER))
    torch.set_num_threads(1)

    def job(folder: Path) -> None:
        if not (folder / "out").exists():
            torch.manual_seed(0)
            EXPORTS[name](folder / "out", source)

    return job


def onnx_quantize() -> Job:
    """The command, with every file that it writes."""
    import tempfile

    import onnx
    from PIL import Image
    from tests.onnx_flow import models

    from quark.cli import main as command

    given = Path(tempfile.mkdtemp(dir=FOLDER))
    graph = "g (float[n, 3, 8, 8] x) => (float[n, 4, 8, 8] y) { h = Conv<pads = [1, 1, 1, 1]>(x, w) y = Relu(h) }"
    onnx.save(models.model(graph, {"w": models.normal(4, 3, 3, 3)}), given / "m.onnx")
    (given / "pictures").mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(given / "pictures" / f"{number}.png")
    words = ["onnx", "quantize", str(given / "m.onnx"), "--data", str(given / "pictures"), "--no-check"]

    def job(folder: Path) -> None:
        (folder / "out").mkdir(exist_ok=True)
        out = folder / "out"
        assert command([*words, "-o", str(out / "q.onnx"), "--plan", str(out / "plan.json")]) == 0

    return job


FOLDER = Path()
SCHEME = ["-s", "int4_wo_32"]
#: Forms of ``tests.torch_flow.export.test_failures``.
EXPORTED = ("shards", "fp8", "awq", "compressed-tensors", "gguf", "onnx", "diffusers")
JOBS: dict[str, Callable[[], Job]] = {
    "adaround": adaround,
    "external data": external_data,
    "gptq": gptq,
    "search": onnx_search,
    "auto": onnx_auto,
    "auto, torch": torch_auto,
    "export": export,
    "files": lambda: torch_files("int4_wo_32"),
    "files, quantized before": quantized_before,
    "files, static": lambda: torch_files("fp8"),
    "files, gptq": lambda: torch_files("int4_wo_32", "gptq"),
    "files, awq": lambda: torch_files("int4_wo_32", "awq"),
    "quantize-files": lambda: torch_command("quantize-files"),
    "quantize-files, converted": lambda: torch_command("quantize-files", "--format", "compressed-tensors"),
    "quantize": lambda: torch_command("quantize"),
    "quantize, gguf": lambda: torch_command("quantize", "--gguf-type", "Q8_0"),
    "convert": lambda: torch_command("convert", "--format", "compressed-tensors"),
    "onnx quantize": onnx_quantize,
} | {f"export, {name}": partial(exported, name) for name in EXPORTED}


def main(folder: str, seed: str, *jobs: str) -> None:
    """Run the trials of every job, in a folder of its own; the last line is what came of them, as JSON."""
    global FOLDER
    found = {}
    for number, (name, count) in enumerate(word.rsplit("=", 1) for word in jobs):
        FOLDER = Path(folder, str(number))
        FOLDER.mkdir()
        found[name] = trials(JOBS[name](), FOLDER, int(seed), int(count))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
