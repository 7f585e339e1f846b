"""What is typed for each command about torch folders; light, as help is to be there at once."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated

import typer

from quark import parallel
from quark.cli.common import COUNT, Backend, ChartReport, Json, LedgerPath, PlanFrom, PlanPath, Threads, Wanted
from quark.cli.paths import FOLDER, Overwrite, Reads, Writes
from quark.cli.values import FIXED
from quark.dataclass import dataclass


def scheme_names() -> list[str]:
    """What a shell completes ``--scheme`` with."""
    from quark.torch.config.schemes import NAMES

    return list(NAMES)


ModelDir = Annotated[
    Path, Reads(), typer.Argument(metavar="MODEL_DIR", help="A folder with config.json and safetensors files.")
]
NewFolder = Annotated[
    Path, Writes(FOLDER), typer.Option("--output", "-o", help="A new folder for the quantized model.")
]
_SCHEME = typer.Option(
    "--scheme", "-s", autocompletion=scheme_names, help="How layers are quantized; `quark torch schemes` lists them."
)
Scheme = Annotated[str | None, _SCHEME]
Layers = Annotated[
    tuple[str, ...],
    typer.Option("--layer", metavar="GLOB=SCHEME", help="Another scheme for some layers; may be repeated."),
]
ConfigFile = Annotated[
    Path | None,
    Reads(),
    typer.Option("--config", help="A configuration file instead of a scheme, such as a plan of `search`."),
]
Candidates = Annotated[
    tuple[str, ...],
    typer.Option(
        "--candidate",
        "-c",
        metavar="NAME",
        help="What a layer may become: a scheme, with `+gptq` and the like behind, or `float`; may be repeated.",
    ),
]
Exclude = Annotated[
    tuple[str, ...],
    typer.Option(metavar="GLOB", help="Layers to keep in float, in addition to the default ones; may be repeated."),
]
ExcludeOnly = Annotated[
    tuple[str, ...],
    typer.Option(
        "--exclude-only", metavar="GLOB", help="Layers to keep in float, instead of the default ones; may be repeated."
    ),
]
Text = Annotated[
    Path | None,
    Reads(),
    typer.Option("--data", help="Text (.txt, .jsonl) or token ids (.npz, .npy, rows are documents)."),
]
Algorithms = Annotated[
    tuple[str, ...],
    Reads(function=True),
    typer.Option(
        "--algorithm",
        "-a",
        metavar="NAME",
        help="An algorithm, such as gptq, or your own as FILE.py:FUNCTION; may be repeated.",
    ),
]
Cache = Annotated[str | None, typer.Option("--kv-cache", help="How keys and values are quantized.")]
Windows = Annotated[int, typer.Option(min=1, max=COUNT, help="Use at most this many windows of the data.")]
Length = Annotated[int, typer.Option("--seq-len", min=2, max=COUNT, help="Tokens in a window.")]
Batch = Annotated[
    int,
    typer.Option(
        "--batch-size", min=1, max=COUNT, help="Windows that run at once; files are read again for each batch."
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="How files are laid out: quark (the default), compressed-tensors, awq, gptq, fp8, modelopt, mxfp4 "
        "(gpt_oss), gguf or onnx.",
    ),
]
For = Annotated[
    str | None,
    typer.Option("--for", help="The program that will read it: vllm, transformers, llama.cpp or onnxruntime-genai."),
]
FloatType = Annotated[
    str | None, typer.Option(help="What stays float, in this type: bfloat16, float16 or float32; else the source's.")
]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code of the model's folder.")]
Device = Annotated[str, typer.Option(help="Where the model runs, such as cpu or cuda.")]


@dataclass(frozen=True)
class TextSource:
    """Where samples come from."""

    data: Text = None
    samples: Windows = 128
    seq_len: Length = 512


@dataclass(frozen=True, kw_only=True)
class Given:
    """A folder, and which of its layers stay float."""

    model: ModelDir
    exclude: tuple[str, ...] = ()
    exclude_only: tuple[str, ...] = ()

    @property
    def left_float(self) -> dict[str, list[str]]:
        """As keys of a configuration file: beside the usual layers, and in their place."""
        given = {"also_exclude": list(self.exclude), "exclude": list(self.exclude_only)}
        return {key: globs for key, globs in given.items() if globs}


@dataclass(frozen=True, kw_only=True)
class FolderJob(Given):
    """A quantization of a folder. Each command makes options of some fields; the others are as usual."""

    output: Path = Path()
    scheme: str | None = None
    config: Path | None = None
    algorithms: tuple[str, ...] = ()
    kv_cache: str | None = None
    layers: tuple[str, ...] = ()
    format: str | None = None
    program: str | None = None
    plan_from: Path | None = None
    source: Annotated[TextSource, FIXED] = field(default_factory=TextSource)
    dtype: str | None = None
    max_shard_size: str | None = None
    batch_size: int = 8
    workers: int = 1
    device: str = "cpu"
    verify: bool = True
    trust_remote_code: bool = False
    json: bool = False

    @property
    def named(self) -> str:
        """The configuration in a word."""
        return self.scheme or str(self.config)


@dataclass(frozen=True, kw_only=True)
class Schemed(FolderJob):
    """A quantization by a scheme."""

    scheme: Scheme = None
    algorithms: Algorithms = ()
    kv_cache: Cache = None
    layers: Layers = ()
    exclude: Exclude = ()
    exclude_only: ExcludeOnly = ()


@dataclass(frozen=True, kw_only=True)
class Explained(Schemed):
    """``quark torch explain``: a scheme or a configuration, and nothing that is written."""

    config: ConfigFile = None

    def __post_init__(self) -> None:
        if (self.scheme is None) == (self.config is None):
            both = "" if self.scheme is None else ", not both"
            raise typer.BadParameter(f"give --scheme NAME or --config FILE{both}")


@dataclass(frozen=True, kw_only=True)
class Predicted(Explained):
    """``quark torch plan``."""

    format: Format = None
    program: For = None
    samples: Windows = 128
    seq_len: Length = 512
    batch_size: Batch = 8
    workers: Annotated[
        int, typer.Option(min=1, max=parallel.MOST, help="Of quantize-files, for which memory is told.")
    ] = 1
    tensors: Annotated[bool, typer.Option(help="Also list every quantized tensor.")] = False
    plan: PlanPath = None
    overwrite: Overwrite = False
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class InMemory(Explained):
    """``quark torch quantize``."""

    output: NewFolder = field()
    format: Format = None
    program: For = None
    plan_from: PlanFrom = None
    source: TextSource = field(default_factory=TextSource)
    gguf_types: Annotated[
        tuple[str, ...],
        typer.Option(
            "--gguf-type",
            metavar="[GLOB=]TYPE",
            help="A type of GGUF, such as Q4_K, or *down_proj=Q6_K for some layers; may be repeated. The same as "
            "--scheme Q4_K --layer '*down_proj=Q6_K' --for llama.cpp.",
        ),
    ] = ()
    dtype: FloatType = None
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Tensors per file at most, such as 5GB or 500MB.")
    ] = "5GB"
    device: Device = "cpu"
    check: Annotated[bool, typer.Option(help="Measure the perplexity of the data before and after.")] = True
    verify: Annotated[bool, typer.Option(help="Read the files back and compare them with the model.")] = True
    trust_remote_code: Remote = False
    json: Json = False

    def __post_init__(self) -> None:
        if self.gguf_types:
            self._take_types()
        super().__post_init__()

    def _take_types(self) -> None:
        """Types of GGUF are schemes; of several for all layers the last counts."""
        if wrong := "--scheme" if self.scheme else "--config" if self.config else "":
            raise typer.BadParameter(f"--gguf-type names a scheme for llama.cpp; leave out {wrong}")
        whole = [text for text in self.gguf_types if "=" not in text]
        if not whole:
            raise typer.BadParameter("no --gguf-type without a glob, which is that of all other layers")
        layers = tuple(scheme_of_type(text) for text in self.gguf_types if "=" in text) + self.layers
        told = {
            "scheme": scheme_of_type(whole[-1]),
            "layers": layers,
            "program": self.program or "llama.cpp",
            "gguf_types": (),
        }
        for name, value in told.items():
            object.__setattr__(self, name, value)


def scheme_of_type(text: str) -> str:
    """``[GLOB=]TYPE`` with the scheme in the place of a type whose name is no scheme."""
    glob, sign, kind = text.rpartition("=")
    return f"{glob}{sign}mxfp4_weight_only" if kind.upper() == "MXFP4" else text


@dataclass(frozen=True, kw_only=True)
class FileByFile(Schemed):
    """``quark torch quantize-files``."""

    output: NewFolder = field()
    scheme: Annotated[str, _SCHEME] = field()
    format: Format = None
    program: For = None
    plan_from: PlanFrom = None
    source: TextSource = field(default_factory=TextSource)
    batch_size: Batch = 8
    dtype: FloatType = None
    max_shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Tensors per file at most, such as 5GB; else a file for each of the source."),
    ] = None
    workers: Annotated[
        int, typer.Option(min=1, max=parallel.MOST, help="Files, and parts of the samples in a block, at once.")
    ] = 1
    backend: Backend = None
    device: Device = "cpu"
    threads: Threads = None
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Converted(FolderJob):
    """``quark torch convert``."""

    output: NewFolder = field()
    format: Format = None
    program: For = None
    scheme: Annotated[
        str | None,
        typer.Option(
            "--requantize", metavar="SCHEME", help="Decode the model and quantize it again, tensor by tensor."
        ),
    ] = None
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class TriedLayers(Given):
    """Layers that are tried alone."""

    scheme: Scheme = None
    candidates: Candidates = ()
    exclude: Exclude = ()
    exclude_only: ExcludeOnly = ()
    source: TextSource = field(default_factory=TextSource)
    workers: Annotated[
        int, typer.Option(min=1, max=parallel.MOST, help="Processes that try layers; each loads it.")
    ] = 1
    backend: Backend = None
    ledger: LedgerPath = None
    device: Device = "cpu"
    trust_remote_code: Remote = False
    overwrite: Overwrite = False


@dataclass(frozen=True, kw_only=True)
class RankLayers(TriedLayers):
    """``quark torch sensitivity``."""

    metric: Annotated[
        str,
        Reads(function=True),
        typer.Option(help="What ranks the layers: kl, sqnr, mse, cosine, or FILE.py:FUNCTION of the model."),
    ] = "kl"
    report: ChartReport = None
    json: Json = False

    def __post_init__(self) -> None:
        if self.scheme is not None and self.candidates:
            raise typer.BadParameter("give --scheme or --candidate, not both: a scheme is the only candidate")


@dataclass(frozen=True, kw_only=True)
class SearchLayers(TriedLayers):
    """``quark torch search``."""

    wanted: Wanted
    config: ConfigFile = None
    program: Annotated[
        str | None,
        typer.Option("--for", help="What will read it: vllm wants layers that it fuses, and experts, in one scheme."),
    ] = None

    def __post_init__(self) -> None:
        if self.scheme is not None and self.config is not None:
            raise typer.BadParameter("give --scheme or --config, not both: the file names its scheme")


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """``quark torch evaluate``."""

    model: ModelDir
    data: Text = None
    samples: Annotated[
        int | None, typer.Option(min=1, max=COUNT, help="Measure at most so many windows of the data; all by default.")
    ] = None
    seq_len: Length = 512
    metric: Annotated[
        str | None,
        Reads(function=True),
        typer.Option(metavar="FILE.py:FUNCTION", help="Your metric: function(model, tokenizer) → a number or a dict."),
    ] = None
    device: Device = "cpu"
    trust_remote_code: Remote = False
    json: Json = False
