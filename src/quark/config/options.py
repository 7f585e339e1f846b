"""The table of ``extra_options``: one typed, documented, defaulted row per option, validated in one place.

A misspelt name is an error that shows the nearest name; a value of the wrong type is an error that names the option. An
option whose default depends on the rest of the configuration has the default ``None`` and says so.
"""

import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from quark.config.conflicts import check_together, idle_options
from quark.config.nbits import parse_nbits
from quark.config.option_table import OptionTable, option
from quark.config.option_values import Bins, FloatMode, MaybeNone, Names, SearchName, Switch, plain
from quark.config.overrides import from_types, parse_overrides
from quark.config.typed import Constraint, Misfit, typed
from quark.errors import ConfigError, unknown

Percent = Annotated[float, Constraint(gt=0, le=100)]
Fraction = Annotated[float, Constraint(gt=0, le=1)]
Positive = Annotated[int, Constraint(gt=0)]


class Options(OptionTable):
    """The validated ``extra_options``. Groups follow the published list of the interface (1 preprocessing, 2 target
    selection, 3 Q/DQ nodes, 4 calibration, 5 bias, 6 scale and numeric type, 7 NPU, 10 runtime, 11 reporting)."""

    # 1 ---------------------------------------------------------------------------------------------------------------
    SkipPreprocess: Switch = option(False, 1, "Leave out every optional graph optimization; lifting old models stays.")
    OptimizeModel: bool = option(True, 1, "Fold constants, remove identities and dead nodes before quantization.")
    SimplifyModel: bool = option(True, 1, "Run onnxslim where a cheap look at the graph says it can gain something.")
    SimplifyModelOptions: dict[str, Any] = option(
        {}, 1, "Keyword arguments handed to onnxslim; given ones make it run."
    )
    RemoveInputInit: bool = option(
        True, 1, "Initializers stop being graph inputs; False: those a feed may override stay float."
    )
    ExpandFused: bool = option(
        True,
        1,
        "Write operators that ONNX Runtime has fused (FusedConv, Attention), and Einsum, as the layers they hold.",
    )
    ConvertOpsetVersion: Positive | None = option(
        None,
        1,
        "Bring the model to this opset: to an older one if its operators are the same there, but never below what the "
        "types need.",
    )
    ConvertFP16ToFP32: bool = option(
        False, 1, "Turn a float16 or bfloat16 model into a float32 one before anything else."
    )
    ReplaceClip6Relu: bool = option(
        False, 1, "Turn Clip from 0 to 6 between two layers into Relu before CLE; only when CLE runs."
    )
    ConvertReduceMeanToGlobalAvgPool: bool | None = option(
        None, 1, "Turn a mean over the spatial axes into GlobalAveragePool (default: for NPU flows and the CPU target)."
    )
    FoldBatchNorm: bool | None = option(
        None,
        1,
        "Fold BatchNormalization into the layers before it, through a Concat too. Default: as OptimizeModel, but not "
        "where a depthwise weight with one 8-bit scale would lose its channels to rounding (outside the NPU flow).",
    )
    FuseInstanceNorm: bool = option(True, 1, "Written-out instance normalization becomes InstanceNormalization.")
    FuseL2Norm: bool = option(True, 1, "A vector divided by its length becomes LpNormalization.")
    FuseLayerNorm: bool = option(
        True,
        1,
        "Written-out layer normalization becomes LayerNormalization, in models of opset 17 and up; with True written "
        "down older ones are lifted.",
    )
    FuseGelu: bool = option(
        True,
        1,
        "Written-out GELU becomes Gelu, in models of opset 20 and up; with True written down older ones are lifted.",
    )
    ConvertNCHWToNHWC: bool = option(
        False, 1, "Images come and go as [N, H, W, C]; calibration data stays as for the float model."
    )
    FixShapes: dict[str, list[int]] | str | None = option(
        None, 1, "Fixed shapes of inputs and outputs, `x:[1,3,224,224];y:[1,1000]`; every other shape follows."
    )
    SplitLargeKernelPool: bool | None = option(
        None, 1, "Split a global average over more than 512 pixels in two. Default: for NPU flows and extended types."
    )
    FasterForms: bool | None = option(
        None,
        1,
        "Convolutions for averages, the focus of detectors, unfolded images and transposed convolutions of stride 1; "
        "Concat for blocks that ScatterND writes; LSTM for its steps written out; PRelu, Elu, Softplus, Mish and norms "
        "that stay float in forms with faster kernels; float16 models compute in float32 inside. Default: for the CPU "
        "target.",
    )
    ConvertSplitToSlice: bool | None = option(
        None, 1, "A Split becomes one Slice per output. Default: for NPU flows and extended types."
    )
    ConvertBNToConv: bool | None = option(
        None,
        1,
        "A BatchNormalization that stands alone becomes a 1x1 convolution. Default: as ConvertSplitToSlice, but not "
        "where one 8-bit scale for the weights would lose channels to rounding (outside the NPU flow).",
    )
    ConvertClipToRelu: bool = option(
        False,
        1,
        "A quantized Clip from 0 becomes a Relu; where the codes reach beyond the upper bound the log says so.",
    )
    FoldRelu: bool = option(
        False, 1, "A Relu or Clip disappears where asymmetric codes behind it cut off the same values."
    )
    PreprocessYAML: str | dict[str, Any] | None = option(
        None,
        1,
        "Passes before and after quantization instead of the list of this page: a YAML file or a template (xint8, a8w8,"
        " a16w8, bf16, bfp16). Sets SkipPreprocess.",
    )
    CopySharedInit: list[str] | None = option(
        None, 1, "Copy initializers shared by nodes of these types, [] for all types; None leaves them shared."
    )
    CopyBiasInit: list[str] | None = option(
        ["Conv", "ConvTranspose", "Gemm"],
        1,
        "The same for biases (third input) of these types; for 8- and 16-bit integers only.",
    )
    # 2 ---------------------------------------------------------------------------------------------------------------
    OpTypesToQuantize: Names = option([], 2, "Quantize only these operator types; [] means all that are known.")
    ExtraOpTypesToQuantize: Names = option([], 2, "Operator types quantized besides the chosen ones.")
    QuantizeAllOpTypes: bool = option(False, 2, "Quantize every operator type found in the model.")
    NodesToQuantize: Names = option([], 2, "Quantize only the nodes of these names; [] means all.")
    MatMulConstBOnly: bool | None = option(
        None,
        2,
        "Leave MatMul nodes without a constant second input in float (default: in dynamic and NPU transformer flows).",
    )
    WeightsOnly: bool = option(False, 2, "Quantize constants only; activations stay float and need no data.")
    ForceQuantizeNoInputCheck: bool = option(
        False,
        2,
        "Quantize layout operators (Reshape, MaxPool, …) even if nothing before them is quantized; not where all "
        "around them is float.",
    )
    AlignEltwiseQuantType: bool = option(
        True, 2, "Constant operands of Add, Mul, … have the activation's type; False: the weight's."
    )
    FloatWhereFaster: bool | None = option(
        None,
        2,
        "Leave in float what the CPU runs faster so by measured kernel times, conversions counted; what saves less "
        "than half a percent of the model's time, or neither 50 microseconds nor 5 percent, or less than 15 "
        "microseconds where nothing would be left in integers, stays as configured. Large weights of what is left are "
        "stored as codes that are made float when the model is loaded, where these keep 40 dB. "
        "Default: for the CPU target.",
    )
    DynamicLSTM: bool | None = option(
        None,
        2,
        "An LSTM computes in 8 bits with a scale for the input and the state of every step (com.microsoft "
        "DynamicQuantizeLSTM), where ONNX Runtime is faster so by measured kernel times. Default: for the CPU target.",
    )
    TuneSpeed: bool = option(
        False,
        2,
        "Time the model on this machine, divided into float and integers in several ways, and take the fastest. What "
        "is found holds for this processor; it is in the plan, and in TunedFloat.",
    )
    TunedFloat: Names | None = option(
        None, 2, "Nodes of the prepared model that TuneSpeed left in float: the same again without timing."
    )
    FloatDecoding: bool | None = option(
        None,
        2,
        "Keep in float what decodes the outputs behind the last layer with weights (boxes, scores). Default: for the "
        "CPU target in 8 bits, where integers make this part no faster.",
    )
    FloatOutputs: bool | None = option(
        None,
        2,
        "Keep the model's outputs in float where no layer that writes integers makes them: a Softmax over many classes "
        "has few codes on its scale from 0 to 1. Default: outside NPU flows.",
    )
    QuantizeEmbeddings: bool = option(
        True,
        2,
        "Tables that Gather takes rows of (embeddings) become codes with a scale for every row, where that keeps their "
        "values to 35 dB; in 16 bits where activations have more than 8; with weights in integers only.",
    )
    EnableSubgraph: bool | None = option(
        None,
        2,
        "Quantize the bodies of If, Loop and Scan too, each on its own data. None: the bodies that hold layers.",
    )
    # 3 ---------------------------------------------------------------------------------------------------------------
    AddQDQPairToWeight: bool = option(False, 3, "Keep float weights behind Q and DQ instead of storing the codes.")
    OpTypesToExcludeOutputQuantization: Names = option([], 3, "Outputs of these operator types stay float.")
    NodesToExcludeOutputQuantization: Names = option([], 3, "Outputs of the nodes of these names stay float.")
    DedicatedQDQPair: bool = option(False, 3, "One Q/DQ pair per consumer instead of one shared pair.")
    EnableDualQuantNodePairs: bool = option(
        False,
        3,
        "Two pairs where precisions meet: the writer's type, then the reader's; each node has its own around it.",
    )
    QDQOpTypePerChannelSupportToAxis: dict[str, int] = option(
        {},
        3,
        "Channel axis of weights per operator type; such weights are read in float where no kernel has that axis.",
    )
    RemoveQDQConvClip: bool = option(
        True,
        3,
        "No Q/DQ between Conv, Add, Gemm, … and a Clip to 0..6 or 0..1 that follows; with True written down, any Clip.",
    )
    RemoveQDQConvRelu: bool = option(True, 3, "No Q/DQ between Conv, Add, Gemm, … and a Relu that follows.")
    RemoveQDQConvLeakyRelu: bool = option(True, 3, "No Q/DQ between Conv, Add, Gemm, … and a LeakyRelu that follows.")
    RemoveQDQConvPRelu: bool = option(True, 3, "No Q/DQ between Conv, Add, Gemm, … and a PRelu that follows.")
    RemoveQDQConvGelu: bool = option(False, 3, "No Q/DQ between Conv, Add, Gemm, … and a Gelu that follows.")
    RemoveQDQInstanceNorm: bool = option(False, 3, "No Q/DQ between InstanceNormalization and its activation.")
    RemoveQDQMulAdd: bool = option(False, 3, "No Q/DQ between a Mul and the Add that alone reads it.")
    RemoveQDQBetweenOps: Annotated[list[Annotated[tuple[str, str], Constraint(strict=False)]], MaybeNone] = option(
        [], 3, "No Q/DQ between these pairs of operator types."
    )
    RemoveFusedQDQ: bool = option(False, 3, "Let the options above remove block operators (BFP, MX) as well.")
    TensorQuantOverrides: dict[str, list[dict[str, Any]]] = option(
        {},
        3,
        "Per tensor name a list of one dictionary (or one per channel) with quant_type, symmetric, reduce_range, rmin, "
        "rmax, scale and zero_point, axis, convert. It overrides every other rule.",
    )
    # 4 ---------------------------------------------------------------------------------------------------------------
    CalibTensorRangeSymmetric: bool | None = option(
        None,
        4,
        "True: calibrated ranges are symmetric around 0, the wider side mirrored. None: Percentile, "
        "LayerwisePercentile and power-of-two scales cut both sides at one threshold, no wider than the data. "
        "Symmetric data types are symmetric either way.",
    )
    MeasureSoftmax: bool = option(
        False,
        4,
        "What a Softmax makes gets the range of the calibration data instead of 0 to 1: for attention over many "
        "places, whose parts are smaller than a code of that scale. Larger parts on other data are clipped.",
    )
    CalibMovingAverage: bool = option(False, 4, "MinMax: exponential moving average of per-sample extremes.")
    CalibMovingAverageConstant: Fraction = option(0.01, 4, "Weight of the newest sample in the moving average.")
    Percentile: Percent = option(99.999, 4, "Percentage of values that the Percentile method keeps unclipped.")
    LWPMetric: Literal["mae", "mse"] = option("mae", 4, "Error that LayerwisePercentile compares candidates by.")
    PercentileCandidates: list[Percent] = option([99.99, 99.999, 99.99999], 4, "Candidates of LayerwisePercentile.")
    WeightCalibrateMethod: Annotated[Literal["MinMax", "MinMSE"] | None, SearchName] = option(
        None,
        4,
        "Range search of float-scale weights: None (MinMax), MinMax, MinMSE, also with their enumeration's name.",
    )
    MinMSEModePof2Scale: Literal["All", "MostCommon", "Percentile"] = option(
        "All", 4, "MinMSE of power-of-two scales: on all data, by votes of the samples, on what lies within Percentile."
    )
    MinMSEModeFloatScale: Annotated[Literal["All", "HistCenter", "Percentile"], FloatMode] = option(
        "All",
        4,
        "MinMSE of weights with float scales: searched on all values (the least error), on a histogram, or the best of "
        "four percentiles; another text means Percentile, and is told.",
    )
    UseRandomData: bool = option(False, 4, "Calibrate on generated data when no reader is given.")
    RandomDataReaderInputShape: dict[str, list[int]] = option({}, 4, "Shape of generated data per input name.")
    RandomDataReaderInputDataRange: dict[str, list[float]] | None = option(
        None, 4, "[min, max] of generated data for every input by name; None means [0, 1) for all."
    )
    CalibDataSize: Positive | None = option(None, 4, "Read only this many samples; None means all.")
    NumBins: Annotated[Annotated[int, Constraint(ge=0)] | None, Bins] = option(
        None,
        4,
        "Histogram bins in every octave (None: 2048, values to 1/2048 of themselves), 16 at least; 0 keeps the values, "
        "in TmpDir, for exact percentiles and errors.",
    )
    CalibOptimizeMem: bool = option(
        True, 4, "False: LayerwisePercentile and MinMSE keep the activations in memory and judge ranges by them."
    )
    CalibOptimizeDisk: bool = option(
        True, 4, "False: LayerwisePercentile and MinMSE keep the activations in TmpDir and judge ranges by them."
    )
    CalibWorkerNum: Positive = option(
        1, 4, "Workers that calibrate: threads, or the processes or cluster that joblib.parallel_config sets."
    )
    CalibPassthroughOpTypes: Names = option(
        [], 4, "Outputs of these operator types share the range of what they read and are not observed."
    )
    SaveTensorHistFig: bool = option(
        False, 4, "Write the histograms and the ranges found in them to ./tensor_hist/index.html."
    )
    SaveAndRestore: str | None = option(
        None, 4, "A .json file that keeps what is finished; an interrupted job goes on from there."
    )
    # 5 ---------------------------------------------------------------------------------------------------------------
    QuantizeBias: bool = option(True, 5, "Quantize the biases of quantized Conv, ConvTranspose and Gemm nodes.")
    BiasBehindMatMul: bool | None = option(
        None,
        5,
        "A constant that is added to the product of a MatMul is its bias: int32 with scale input x weight, and no Q/DQ "
        "between the two. Default: yes for the CPU target. Takes 8-bit activations and weights.",
    )
    Int32Bias: bool | None = option(
        None,
        5,
        "Biases as int32 with scale input x weight. Default: False when both activations and weights have "
        "power-of-two scales (the NPU flow: biases have the weight's type and a scale of their own), else True. "
        "Beside weights in blocks (BFP16, MX) biases stay float unless False is given.",
    )
    Int16Bias: bool = option(
        False, 5, "Biases as int16, at the least 2**k times input x weight scale at which they fit; needs opset 21."
    )
    AdjustBiasScale: bool = option(
        True, 5, "Biases configured as int32 get the scale input x weight; False: the scale of their own values."
    )
    # 6 ---------------------------------------------------------------------------------------------------------------
    ActivationScaled: bool = option(False, 6, "Scale bfloat16 and float16 activations into a reduced range.")
    WeightScaled: bool = option(False, 6, "Scale bfloat16 and float16 weights into a reduced range.")
    QuantizeFP16: bool | None = option(
        None,
        6,
        "Quantize a float16 model as it is, computing in float16. Default: when the model is one; so does False.",
    )
    UseFP32Scale: bool | None = option(
        None, 6, "Scales of a float16 model in float32, with Casts around Q and DQ. Default: as QuantizeFP16."
    )
    UseUnsignedReLU: bool = option(False, 6, "Outputs of Relu, and of Clip from 0, use unsigned asymmetric codes.")
    Int16Scale: bool = option(False, 6, "Replace float scales by the nearest M / 2^N that fits 16-bit integers.")
    # 7 ---------------------------------------------------------------------------------------------------------------
    EnableNPUCnn: bool | None = option(
        None, 7, "The NPU flow, which limits positions. Default: when activations and weights have power-of-two scales."
    )
    EnableNPUTransformer: bool = option(False, 7, "Quantize Gemm and MatMul only, those with a constant second input.")
    SimulateDPU: bool = option(
        True,
        7,
        "Let the model compute what the NPU computes, as the Convert…DPU options say: by default in the NPU flow, with "
        "True written down in every static flow.",
    )
    ConvertLeakyReluToDPUVersion: bool | None = option(
        None, 7, "LeakyRelu slopes in 256ths (where SimulateDPU acts: yes)."
    )
    ConvertSigmoidToHardSigmoid: bool | None = option(None, 7, "Sigmoid becomes HardSigmoid (likewise).")
    ConvertHardSigmoidToDPUVersion: bool | None = option(
        None, 7, "HardSigmoid of slope 1/6 with the factor of the device's 2731 / 2**14 behind it (likewise)."
    )
    ConvertAvgPoolToDPUVersion: bool | None = option(
        None, 7, "Average pools with the factor of the device's division behind them (likewise)."
    )
    ConvertReduceMeanToDPUVersion: bool | None = option(
        None, 7, "ReduceMean with the factor of the device's division behind it (likewise)."
    )
    ConvertSoftmaxToDPUVersion: bool = option(False, 7, "Softmax as the device's bfloat16 polynomial.")
    ConvertClipToDPUVersion: bool = option(False, 7, "Clip with whole bounds within -128..127.")
    ConvertInstanceNormToDPUVersion: bool = option(
        False, 7, "InstanceNormalization as com.amd.quark::ExtendedInstanceNormalization."
    )
    NPULimitationCheck: bool = option(True, 7, "Apply the rules below; without it no Align… and no Adjust… acts.")
    MaxLoopNum: Positive = option(5, 7, "Rounds of the NPU's rules; they end when a round moves nothing.")
    AdjustShiftCut: bool = option(True, 7, "NPU flow: weights of Conv and Gemm so that 0 <= w + i - o <= 16.")
    AdjustShiftBias: bool = option(True, 7, "NPU flow: biases of Conv and Gemm so that w + i - b <= 15.")
    AdjustShiftRead: bool = option(True, 7, "NPU flow: operands of Add and Sub within 7 shifts of each other.")
    AdjustShiftWrite: bool = option(True, 7, "NPU flow: results of Add and Mul within the write shifter.")
    AdjustHardSigmoid: bool = option(True, 7, "NPU flow: operands and results of HardSigmoid fit its table.")
    AdjustShiftSwish: bool = option(True, 7, "NPU flow: results of x * HardSigmoid(x) so that 0 <= sum(i) - o <= 15.")
    AlignConcat: bool | None = option(None, 7, "One scale for the inputs and the output of Concat (NPU flow: yes).")
    AlignPool: bool | None = option(None, 7, "One scale for input and output of pooling (NPU flow: yes).")
    AlignPad: bool | None = option(
        None,
        7,
        "One scale for input and output of Pad, even where an entry gives its readers another range (NPU flow: yes).",
    )
    AlignSlice: bool | None = option(
        None,
        7,
        "One scale for input and output of Slice, even where an entry gives its readers another range (NPU flow: yes).",
    )
    AlignTranspose: bool = option(
        False, 7, "One scale for input and output of Transpose, even where an entry gives its readers another range."
    )
    AlignReshape: bool = option(
        False, 7, "One scale for input and output of Reshape, even where an entry gives its readers another range."
    )
    # 8 ---------------------------------------------------------------------------------------------------------------
    BF16WithClip: bool = option(False, 8, "Clip activations to the finite bfloat16 values before they are rounded.")
    BF16QDQToCast: bool = option(False, 8, "Write bfloat16 and float16 as plain Cast pairs instead of extended Q/DQ.")
    EnableVaimlBF16: bool = option(
        False, 8, "Weights rounded to bfloat16 but stored as float32, activations as Casts, float outputs."
    )
    RefineBlockAxis: bool | None = option(
        None, 8, "Blocks run along the axis that MatMul and Gemm sum over, and along Softmax's own (default: yes)."
    )
    # 9 ---------------------------------------------------------------------------------------------------------------
    UseMatMulNBits: bool = option(
        False,
        9,
        "Store the weights of MatMul, Gemm and Gather in few bits; nothing else is quantized, no data is read.",
    )
    MatMulNBitsParams: dict[str, Any] = option(
        {},
        9,
        "Algorithm (DEFAULT, GPTQ, HQQ), GroupSize (128; a power of two from 16), Symmetric (True), Bits (4; 2, 4, 8), "
        "AccuracyLevel (0: ONNX Runtime's choice, 1 float32, 2 float16, 3 bfloat16, 4 int8).",
    )
    # 10 --------------------------------------------------------------------------------------------------------------
    ExecutionProviders: list[str] = option(["CPUExecutionProvider"], 10, "ONNX Runtime providers for calibration.")
    TmpDir: str | None = option(
        None, 10, "Folder for intermediate files, made where it is missing; None: the system's. It is left empty."
    )
    CryptoMode: bool = option(
        False,
        10,
        "Nothing of the model reaches the disk or a message; model and result are a ModelProto. ONNX Runtime's "
        "telemetry is switched off, for the whole process.",
    )
    EncryptionAlgorithm: Literal["AES-256"] | None = option(
        None, 10, "With CryptoMode: intermediate files are allowed and encrypted. None: they stay in memory."
    )
    FillAllValueInfo: bool = option(False, 10, "State the type and shape of every tensor of the quantized model.")
    UserCustomOpLibPath: str | list[str] | None = option(
        None, 10, "Libraries with the model's custom operators, or folders that hold them."
    )
    # 11 --------------------------------------------------------------------------------------------------------------
    DebugMode: bool = option(False, 11, "Log every decision of the plan.")
    PrintSummary: bool = option(True, 11, "Print what was quantized when the work is done.")
    IgnoreWarnings: bool = option(True, 11, "Hide warnings that this package raises while it works.")
    EvalMetrics: bool = option(
        False, 11, "Measure cosine similarity and L2 distance to the float model; the summary then ranks layers too."
    )
    EvalDataReader: Any = option(None, 11, "Data for EvalMetrics; the calibration data when None.")

    def idle(self, mode: str) -> str:
        """A sentence about the options that were set and that change nothing in a mode; empty where there are none."""
        given = {name: value for name, value in self if name in self.given}
        usual = {name: OPTIONS[name].default for name in given}
        changed = {k: v for k, v in given.items() if (usual[k] is None and v is not None) or v != usual[k]}
        return idle_options(changed, {name: OPTIONS[name].group for name in changed}, mode)


#: The rows, by name.
OPTIONS = Options.ROWS
#: Options that hold data or arguments of others.
_AS_GIVEN = ("EvalDataReader", "SimplifyModelOptions")


def parse_options(given: Mapping[str, Any] | None) -> Options:
    """Validate ``extra_options``.

    Raises:
        ConfigError: an unknown name (the nearest one is shown), or a bad value.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"extra_options must be a dictionary {{option: value}}, not {given!r}")
    given = dict(given or {})
    if "MixedPrecisionTensor" in given:
        older = "MixedPrecisionTensor is an older option: write TensorQuantOverrides={tensor: [{'quant_type': type}]}"
        warnings.warn(older, DeprecationWarning, stacklevel=3)
        types = from_types(given.pop("MixedPrecisionTensor"))
        given["TensorQuantOverrides"] = types | dict(given.get("TensorQuantOverrides") or {})
    for name in given:
        if name not in OPTIONS:
            raise ConfigError(unknown("option", name, OPTIONS) + " (field extra_options)")
    given |= {name: plain(value) for name, value in given.items() if name not in _AS_GIVEN}
    parse_overrides(given.get("TensorQuantOverrides") or {})
    options = Options(**{name: _value(name, given[name]) for name in OPTIONS if name in given})
    check_together(dict(options))
    if options.MatMulNBitsParams:
        parse_nbits(options.MatMulNBitsParams)
    return options


def _value(name: str, given: Any) -> Any:
    """What was given for an option, in its type."""
    try:
        return typed(given, Options.__annotations__[name], strict=True)
    except Misfit as error:
        place = ".".join(map(str, (name, *error.place)))
        raise ConfigError(f"the option {place} cannot be {error.value!r}: {error.reason}") from error
