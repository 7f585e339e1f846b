"""What is typed for each command about ONNX models and for ``quark auto``; light, as help is to be there at once."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quark import parallel
from quark.cli.beside import preprocessing_beside, recipe_beside
from quark.cli.common import (
    COUNT,
    DEFAULT_PRESET,
    Backend,
    ChartReport,
    Drop,
    FailSlower,
    FailUnder,
    Json,
    Labels,
    LedgerPath,
    OwnMetric,
    PlanFrom,
    PlanPath,
    Purpose,
    ReportPath,
    Threads,
    TrialReport,
    TuneSpeed,
    Wanted,
    chosen_preset,
    preset_names,
)
from quark.cli.paths import LIKE_MODEL, Overwrite, Reads, Writes
from quark.cli.source_options import SampleSource
from quark.dataclass import dataclass

if TYPE_CHECKING:
    from quark.config.plan import Plan

FloatModel = Annotated[Path, Reads(), typer.Argument(help="The float model, an .onnx file. It is not changed.")]
ModelOutput = Annotated[
    Path,
    Writes("model", beside=preprocessing_beside),
    typer.Option("--output", "-o", help="Where to write the quantized model."),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        "-p",
        show_default=DEFAULT_PRESET,
        autocompletion=preset_names,
        help="A configuration by name (`quark presets` lists them), or two data types as in `uint8/int8@channel`.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    Reads(),
    typer.Option("--config", help="A configuration file instead of a preset, such as a plan of `search`."),
]
Candidates = Annotated[
    tuple[str, ...],
    typer.Option(
        "--candidate",
        "-c",
        metavar="NAME",
        help="What a layer may become: a preset, two data types as in `uint8/int4@32`, with `+adaround` and the like "
        "behind, or `float`; may be repeated.",
    ),
]
Workers = Annotated[
    int, typer.Option(min=1, max=parallel.MOST, help="Number of layers, or recipes, to try at the same time.")
]
Settings = Annotated[
    tuple[str, ...],
    typer.Option("--set", metavar="OPTION=VALUE", help="Set one option (`quark options` lists them); may be repeated."),
]
Hardware = Annotated[
    str | None, typer.Option("--for", metavar="cpu|npu|gpu", help="The hardware that will run it: chooses the preset.")
]
Exclude = Annotated[
    tuple[str, ...],
    typer.Option(metavar="NODE", help="Keep a node in float: its name or a `^regular expression`; may be repeated."),
]
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout",
        "--target",
        metavar="cpu|any",
        help="`cpu`: lay the model out for ONNX Runtime's CPU kernels. `any`: exactly as configured.",
    ),
]
EvalData = Annotated[
    Path | None, Reads(), typer.Option("--eval-data", help="Samples to measure the result with, given as for --data.")
]


@dataclass(frozen=True, kw_only=True)
class Configured:
    """A model, and which configuration it is for."""

    model: FloatModel
    preset: Preset = None
    hardware: Hardware = None
    config: ConfigFile = None
    settings: Settings = ()
    layout: Layout = None
    exclude: Exclude = ()

    def __post_init__(self) -> None:
        self.chosen  # two that contradict each other are told before anything begins  # noqa: B018

    @property
    def chosen(self) -> str:
        """The preset: as typed, or that of the hardware, or the usual one."""
        return chosen_preset(self.preset, self.config, self.hardware)

    @property
    def named(self) -> str:
        """The configuration in a word."""
        return self.chosen if self.config is None else str(self.config)


@dataclass(frozen=True, kw_only=True)
class Decided(Configured):
    """A configuration whose decisions a file may say."""

    algorithms: tuple[str, ...] = ()
    plan_from: PlanFrom = None

    def given_plan(self) -> Plan | None:
        """The decisions that are to be carried out, where a file has them."""
        if self.plan_from is None:
            return None
        from quark.cli.plans import plan_in

        return plan_in(self.plan_from)


@dataclass(frozen=True, kw_only=True)
class Quantize(Decided):
    """``quark onnx quantize``."""

    output: ModelOutput
    algorithms: Annotated[
        tuple[str, ...],
        Reads(function=True),
        typer.Option(
            "--algorithm",
            "-a",
            metavar="NAME",
            help="An algorithm, such as ce or adaround, or your own as FILE.py:FUNCTION; may be repeated.",
        ),
    ] = ()
    tune_speed: TuneSpeed = False
    eval_data: EvalData = None
    report: ReportPath = None
    plan: PlanPath = None
    fail_under: FailUnder = None
    fail_slower: FailSlower = False
    check: Annotated[bool, typer.Option(help="Afterwards run both models: SQNR, cosine, latency.")] = True
    threads: Threads = None
    backend: Backend = None
    overwrite: Overwrite = False
    json: Json = False
    source: SampleSource = field(default_factory=SampleSource)


@dataclass(frozen=True, kw_only=True)
class Predict(Decided):
    """``quark onnx plan``."""

    tensors: Annotated[bool, typer.Option(help="Also list every quantized tensor.")] = False
    plan: PlanPath = None
    overwrite: Overwrite = False
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Tried(Configured):
    """Layers that are tried alone."""

    candidates: Candidates = ()
    workers: Workers = 1
    backend: Backend = None
    ledger: LedgerPath = None
    source: SampleSource = field(default_factory=SampleSource)


@dataclass(frozen=True, kw_only=True)
class Rank(Tried):
    """``quark onnx sensitivity``."""

    metric: Annotated[
        str,
        Reads(function=True),
        typer.Option(help="What ranks the layers: sqnr, mse, cosine, kl, or FILE.py:FUNCTION of a model's path."),
    ] = "sqnr"
    report: ChartReport = None
    overwrite: Overwrite = False
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class SearchRequest(Tried):
    """``quark onnx search``."""

    layout: Annotated[str | None, typer.Option("--layout", metavar="cpu|any", help="As of `quantize`.")] = None
    wanted: Wanted
    fail_under: FailUnder = None
    fail_slower: FailSlower = False
    overwrite: Overwrite = False


@dataclass(frozen=True, kw_only=True)
class WithOperators:
    """Models that may have operators of the user's own."""

    custom_ops: Annotated[
        Path | None,
        Reads(),
        typer.Option(help="A library with custom operators of an ONNX model, or a folder of some."),
    ] = None

    @property
    def libraries(self) -> str | None:
        """The same as the option ``UserCustomOpLibPath`` has it."""
        return None if self.custom_ops is None else str(self.custom_ops)


@dataclass(frozen=True, kw_only=True)
class Compare(WithOperators):
    """``quark onnx compare``."""

    model: Annotated[Path, Reads(), typer.Argument(metavar="FLOAT_MODEL", help="The float model.")]
    quantized: Annotated[
        tuple[Path, ...],
        Reads(),
        typer.Argument(metavar="QUANTIZED_MODEL...", help="The models made from it, one or more."),
    ]
    report: ReportPath = None
    fail_under: FailUnder = None
    fail_slower: FailSlower = False
    overwrite: Overwrite = False
    json: Json = False
    source: SampleSource = field(default_factory=SampleSource)


@dataclass(frozen=True, kw_only=True)
class Auto(WithOperators):
    """``quark auto``, for a file and for a folder."""

    model: Annotated[Path, Reads(), typer.Argument(help="An .onnx file, or a torch folder. It is not changed.")]
    output: Annotated[
        Path,
        Writes(LIKE_MODEL, beside=recipe_beside),
        typer.Option("--output", "-o", help="Where to write the best model."),
    ]
    purpose: Purpose = None
    metric: OwnMetric = None
    labels: Labels = None
    drop: Drop = None
    minutes: Annotated[float, typer.Option(min=0.0, help="Time for all trials.")] = 10.0
    seq_len: Annotated[int, typer.Option(min=2, max=COUNT, help="Folders: tokens per window.")] = 512
    exclude: Exclude = ()
    ledger: LedgerPath = None
    workers: Workers = 1
    backend: Backend = None
    report: TrialReport = None
    overwrite: Overwrite = False
    json: Json = False
    source: SampleSource = field(default_factory=SampleSource)

    @property
    def goal(self) -> str:
        """What the model is made for: as typed, or the usual one of its kind."""
        return self.purpose or ("transformers" if self.model.is_dir() else "cpu")
