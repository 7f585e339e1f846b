"""Every row of ``docs/seeds/conformance.md``: a place in the documents, what it is about, and the test that holds it.

Rows of options come from ``tests.seeds.options``; all others are written here, by page. A place is a page and a line,
or lines, never their words. ``OWN`` are the rows that differ on purpose, with the reason. ``SILENT`` are the lines that
promise nothing: headings, background, and those that a row beside them speaks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.seeds.options import BY_NAME, NBITS, OPTIONS, OVERRIDES
from tests.seeds.test_basics import ONNX_TYPES
from tests.seeds.test_calibration import METHODS, TYPES
from tests.seeds.test_configuration import FIELDS, GROUPS, NAMED, SPECS
from tests.seeds.test_options import OWN as OWN_DEFAULTS
from tests.seeds.test_options import RULED
from tests.seeds.test_shapeshifter import FLOAT, QUANTIZED, TEMPLATES


@dataclass(frozen=True)
class Row:
    """One line of the page.

    Attributes:
        page: number of the document.
        first, last: its lines.
        about: what is promised, in our words.
        test: id of the test; a parameter in brackets.
        reason: why we differ, where we do.
    """

    page: str
    first: int
    last: int
    about: str
    test: str
    reason: str = ""


def _here(file: str, test: str) -> str:
    return f"tests/seeds/test_{file}.py::test_{test}"


#: Rule of a default -> the test that holds it.
RULES = {
    **dict.fromkeys(("QuantizeFP16", "UseFP32Scale"), "float16_models_compute_in_float16_by_themselves"),
    "Int32Bias": "biases_have_32_bits_but_in_the_flow_of_the_npu",
    "MatMulConstBOnly": "a_matmul_of_two_activations_is_quantized_statically_and_not_dynamically",
    "CalibTensorRangeSymmetric": "ranges_are_symmetric_by_method",
    "RefineBlockAxis": "blocks_run_along_the_summed_axis",
    "FoldBatchNorm": "normalizations_fold_as_far_as_the_model_is_optimized",
    **{name: f"forms_for_devices[{name}]" for name in ("ConvertBNToConv", "ConvertReduceMeanToGlobalAvgPool")},
    **{name: f"forms_for_devices[{name}]" for name in ("SplitLargeKernelPool", "ConvertSplitToSlice")},
    **{
        name: f"alignment_is_for_powers_of_two[{name}]"
        for name in ("AlignConcat", "AlignPool", "AlignPad", "AlignSlice")
    },
}
DEVICE = "on in the flow of the NPU only, as in the peer's code: elsewhere it would cost accuracy and serve no device"
#: Options whose default is ours on purpose -> the reason.
OWN = {
    "AddQDQPairToWeight": "weights are stored in their real width for every type; float ones on request",
    "NumBins": "as many bins in every octave, for every method: no coarser anywhere",
    "AlignEltwiseQuantType": "on: 8-bit constants beside 16-bit activations cost 3 dB on a real model",
    "MinMSEModeFloatScale": "a search on all values, whose error is never larger",
    "EnableSubgraph": "bodies that hold layers are quantized unasked: a whole network may be in an If",
    "CalibTensorRangeSymmetric": "Percentile has one threshold for both sides, and ends where the data end unless told",
    "FoldBatchNorm": "as OptimizeModel, but for depthwise weights that one 8-bit scale would lose (told, with figures)",
    **{row.name: DEVICE for row in OPTIONS if row.name in RULED and row.name not in RULES},
}


def _of_options() -> Iterator[Row]:
    for option in OPTIONS:
        name, line = option.name, option.line
        yield Row("004", line, line, f"{name}: kind of its values", _here("options", f"type[{name}]"))
        if name in RULES:
            test = _here("defaults", RULES[name])
        elif name in RULED:
            test = _here("defaults", f"functions_of_the_device[{name}]")
        else:
            test = _here("options", f"{'own_' if name in OWN_DEFAULTS else ''}default[{name}]")
        yield Row("004", line, line, f"{name}: default", test, OWN.get(name, ""))
        yield Row("004", line, line, f"{name}: effect", option.test)
        yield Row("004", line, line, f"{name}: on awkward shapes", _here("options", f"awkward_shapes[{name}]"))
    for name in (*NBITS, *OVERRIDES):
        option, kind = BY_NAME[name], "parameter_of_nbits" if name in NBITS else "field_of_an_override"
        yield Row("004", option.line, option.line, f"{name}: kind, default", _here("options", f"{kind}[{name}]"))
        yield Row("004", option.line, option.line, f"{name}: effect", option.test)


#: page -> lines, what, test (of tests/seeds/test_<file>.py).
WRITTEN: dict[str, list[tuple[int, int, str, str, str]]] = {
    "000": [
        *(
            (2 * k + 3, 2 * k + 4, f"method {name}", "calibration", f"method[{method}]")
            for k, (name, method) in enumerate(
                zip(
                    ("MinMax", "Percentile", "LayerwisePercentile", "MSE", "Entropy", "Distribution"),
                    ("MinMax", "Percentile", "LayerwisePercentile", "MinMSE", "Entropy", "Distribution"),
                    strict=True,
                )
            )
        ),
        (2, 2, "the methods are there", "calibration", "the_default_of_eight_bits"),
        (8, 8, "a threshold for every tensor", "calibration", "layers_are_judged_for_themselves"),
        (14, 14, "Distribution with FP8", "calibration", "distribution_of_fp8[FP8E4M3Spec]"),
        *(
            (
                21 + 3 * k,
                23 + 3 * k,
                f"type {name}: least, largest, on awkward shapes",
                "calibration",
                f"data_type[{name}]",
            )
            for k, name in enumerate(TYPES)
        ),
        (16, 16, "the table of types as a whole", "calibration", "data_types_are_those_of_the_text"),
        (82, 82, "three types of scales", "calibration", "scale_types"),
        (84, 84, "three granularities", "calibration", "scale_types"),
        (86, 86, "type and symmetry decide about accuracy", "calibration", "wider_codes_cost_less"),
        (87, 87, "codes of a symmetric range", "calibration", "formula[True]"),
        (88, 88, "codes of an asymmetric range", "calibration", "formula[False]"),
        (90, 112, "the specification written out, executed", "calibration", "the_specification_written_out"),
        (91, 103, "defaults of Int8Spec", "calibration", "the_default_of_eight_bits"),
    ],
    "001": [
        (11, 15, "1024 in 16 bits", "basics", "fewer_bits_may_lose_nothing_or_something"),
        (29, 30, "loss and overflow", "basics", "fewer_bits_may_lose_nothing_or_something"),
        (31, 31, "integers, floats and MX from 16 to 4 bits", "basics", "fewer_bits_may_lose_nothing_or_something"),
        (43, 45, "quantization without training", "configuration", "the_overview_runs"),
        *(
            (49, 49, f"low float precision: {name}", "basics", f"type_of_the_onnx_flow[{name}]")
            for name in ("Float16", "BFloat16")
        ),
        (50, 50, "integers from float models", "basics", "type_of_the_onnx_flow[Int8]"),
        (62, 72, "both equations", "basics", "formulas[False]"),
        (74, 74, "scale and offset from the extremes", "basics", "scale_and_offset_come_from_the_extremes"),
        (80, 80, "symmetric: no offset", "basics", "formulas[True]"),
        (81, 81, "asymmetric: an offset", "basics", "formulas[False]"),
        (83, 83, "per tensor, channel, group", "basics", "scales_are_shared_by_a_tensor_a_channel_or_a_group"),
        (89, 97, "values keep their width", "basics", "fake_quantized_values_have_their_own_width"),
        (99, 99, "runs at the higher width", "basics", "the_model_runs_without_this_package"),
        (105, 109, "Q and DQ nodes", "basics", "the_model_runs_without_this_package"),
        (113, 113, "runs without the package", "basics", "the_model_runs_without_this_package"),
        (117, 124, "layers are exchanged", "basics", "layers_are_replaced_and_what_they_read_and_write_is_rounded"),
        (
            126,
            126,
            "inputs, outputs, biases, weights",
            "basics",
            "layers_are_replaced_and_what_they_read_and_write_is_rounded",
        ),
        (128, 128, "calibration data runs through", "strategies", "sample[2-3]"),
        *(
            (132 + k, 132 + k, f"observer {name}", "basics", f"observer[{name}]")
            for k, name in enumerate(("PerTensorMinMaxObserver", "PerChannelMinMaxObserver", "PerBlockMXObserver"))
        ),
        (138, 140, "both flows", "strategies", "sample[2-1]"),
        (142, 148, "the steps", "basics", "the_steps"),
        *((155, 155, f"ONNX flow: {name}", "basics", f"type_of_the_onnx_flow[{name}]") for name in ONNX_TYPES),
        (155, 155, "types of the torch flow", "basics", "types_of_the_torch_flow"),
        (156, 156, "modes", "basics", "modes_of_the_torch_flow"),
        *(
            (157, 157, f"torch flow: {name}", "strategies", f"sample[{key}]")
            for key, name in (("2-1", "weight only"), ("2-2", "dynamic"), ("2-3", "static"))
        ),
        (158, 158, "schemes of the torch flow", "strategies", "dynamic_scales_may_be_finer[per_group]"),
        *(
            (158, 158, f"ONNX flow: {name}", "basics", f"scheme_of_the_onnx_flow[{name}]")
            for name in ("Tensor", "Channel")
        ),
        *(
            (159, 159, f"{'a' * (not flag)}symmetric", "configuration", f"symmetric[Int8Spec-{flag}]")
            for flag in (True, False)
        ),
        *(
            (160, 160, f"ONNX flow: {name}", "configuration", f"calibration_method[{name}]")
            for name in ("MinMax", "Percentile", "MinMSE", "Entropy")
        ),
        (161, 161, "scales of float16 models", "effects", "fp32_scale"),
        *(
            (163, 163, f"torch flow: {name}", "basics", f"layer_of_the_torch_flow[{name}]")
            for name in ("Linear", "Conv2d", "ConvTranspose2d", "Embedding", "EmbeddingBag")
        ),
        (163, 163, "ONNX operators", "../onnx_flow/test_every_model.py", "models_of_old_exporters"),
        *(
            (164, 164, f"ONNX flow: {name}", "basics", f"algorithm_of_the_onnx_flow[{name}Config]")
            for name in ("Quarot", "SmoothQuant", "CLE", "BiasCorrection")
        ),
        (164, 164, "torch flow: SmoothQuant", "basics", "algorithm_of_the_torch_flow[SmoothQuantConfig]"),
        *(
            (165, 165, f"ONNX flow: {name}", "basics", f"algorithm_of_the_onnx_flow[{name}Config]")
            for name in ("AdaQuant", "AdaRound", "GPTQ")
        ),
        *(
            (165, 165, f"torch flow: {name}", "basics", f"algorithm_of_the_torch_flow[{name}Config]")
            for name in ("AWQ", "GPTQ")
        ),
        (166, 166, "formats of export", "basics", "exports_of_the_torch_flow"),
    ],
    "002": [
        (7, 7, "weight only: activations stay float", "strategies", "only_weights_are_quantized"),
        (9, 9, "static: ranges from data", "strategies", "dynamic_ranges_follow_the_input_and_static_ones_do_not"),
        (
            11,
            11,
            "dynamic: ranges of the input",
            "strategies",
            "dynamic_ranges_follow_the_input_and_static_ones_do_not",
        ),
        (15, 69, "the sample, weight only, executed", "strategies", "sample[2-1]"),
        (39, 49, "the sample, dynamic, executed", "strategies", "sample[2-2]"),
        (51, 58, "the sample, static, executed", "strategies", "sample[2-3]"),
        (66, 69, "modules are replaced in place", "strategies", "modules_are_replaced_in_place"),
        (71, 71, "one interface for all", "strategies", "sample[2-2]"),
        (
            75,
            77,
            "dynamic FP8 over timesteps",
            "strategies",
            "the_dynamic_default_for_diffusion_beats_static_ranges_over_timesteps",
        ),
        (
            79,
            79,
            "a static range over timesteps costs more",
            "strategies",
            "the_dynamic_default_for_diffusion_beats_static_ranges_over_timesteps",
        ),
        *(
            (81, 81, f"dynamic {name}", "strategies", f"dynamic_scales_may_be_finer[{name}]")
            for name in ("per_channel", "per_group", "per_token")
        ),
        (85, 91, "the configuration, executed", "strategies", "the_configuration_for_diffusion"),
        (97, 97, "SVDQuant is there", "strategies", "very_few_bits_have_svdquant"),
    ],
    "003": [
        (9, 9, "symmetric, 8 bits, powers of two", "xint8", "symmetric_eight_bits_with_powers_of_two"),
        (19, 63, "the example, executed", "xint8", "the_first_example"),
        (67, 67, "the graph is optimized", "xint8", "the_graph_is_optimized_by_itself"),
        (71, 96, "results saved, executed", "xint8", "results_are_saved"),
        (97, 99, "cosine and L2", "xint8", "the_metrics_of_a_comparison"),
        (99, 101, "the command, executed", "xint8", "results_are_compared"),
        (105, 114, "AdaRound, executed", "xint8", "fine_tuning[XINT8_ADAROUND_CONFIG]"),
        (115, 122, "AdaQuant, executed", "xint8", "fine_tuning[XINT8_ADAQUANT_CONFIG]"),
    ],
    "004": [
        (3, 7, "the statements, executed", "configuration", "the_overview_runs"),
        (8, 11, "input, output, data", "configuration", "inputs_and_outputs"),
        *(
            (20 + 4 * k, 22 + 4 * k, f"category {k + 1}", "configuration", f"category[{k + 1}]")
            for k in range(len(GROUPS))
        ),
        (65, 74, "the fields as a whole", "configuration", "fields_are_those_of_the_text"),
        *((67 + k, 67 + k, f"field {name}", "configuration", f"field[{name}]") for k, name in enumerate(FIELDS)),
        (75, 75, "the default", "configuration", "the_default_is_eight_bits_everywhere"),
        *((76, 76, f"{name}Spec", "configuration", f"spec[{name}]") for name in SPECS),
        (77, 77, "signed types are symmetric, unsigned are not", "configuration", "spec[UInt8]"),
        *((77, 77, f"symmetric={flag}", "configuration", f"symmetric[Int8Spec-{flag}]") for flag in (True, False)),
        *(
            (78, 78, f"scale type {name}", "configuration", f"scale_type[{name}]")
            for name in ("Float32", "PowerOf2", "Int16")
        ),
        *(
            (79, 79, f"method {name}", "configuration", f"calibration_method[{name}]")
            for name in METHODS
            if name != "Distribution"
        ),
        (79, 79, "method Distribution", "calibration", "distribution_of_fp8[FP8E4M3Spec]"),
        *(
            (80, 80, f"granularity {name}", "configuration", f"granularity[{name}")
            for name in ("Tensor", "Channel", "Group")
        ),
        *((81, 81, f"layers by {form}", "configuration", f"specific_layers[{form}]") for form in NAMED),
        (81, 81, "later inputs win", "configuration", "later_inputs_win_over_earlier_outputs"),
        (82, 82, "layers by type, None", "configuration", "layer_types"),
        *((83, 83, f"left float by {form}", "configuration", f"exclude[{form}]") for form in NAMED),
        (84, 84, "a list of algorithms", "configuration", "algorithms"),
        (85, 85, "model and data in two files", "configuration", "external_data[True]"),
        (86, 86, "every option is listed", "options", "the_table_is_what_the_text_says"),
        *((87, 87, f"template {name}", "shapeshifter", f"template[{name}]") for name in TEMPLATES),
        *((87, 87, f"pass {name}", "shapeshifter", f"pass[{name}]") for name in FLOAT),
        *((87, 87, f"pass {name}", "shapeshifter", f"pass_of_quantized_models[{name}]") for name in QUANTIZED),
        (87, 87, "pass onnx_convert_fp16_to_fp32", "shapeshifter", "float16_to_float32"),
        (87, 87, "a pass of one's own", "shapeshifter", "a_pass_of_ones_own"),
        (87, 88, "passes before and after quantization", "shapeshifter", "passes_around_a_quantization"),
        (
            97,
            97,
            "CryptoMode wants a model in memory",
            "../onnx_flow/test_runtime_options.py",
            "crypto_mode_wants_a_model_in_memory",
        ),
        (107, 107, "Int16Bias and the opset", "promises", "int16_biases_come_with_an_opset_that_has_them"),
        (110, 110, "every keyword reaches onnxslim", "promises", "simplification_takes_the_options_of_the_tool"),
        (119, 119, "the default axis elsewhere", "promises", "the_default_axis_holds_where_no_other_is_named"),
        (119, 119, "none for the NPU", "promises", "channels_are_not_for_the_npu"),
        (120, 120, "symmetric with powers of two", "defaults", "the_least_error_of_powers_of_two_is_symmetric"),
        (121, 122, "no moving average with powers of two", "promises", "a_moving_average_has_no_part_in_a_search"),
        (128, 128, "a range for every input, or ValueError", "promises", "random_data_needs_a_range_for_every_input"),
        (128, 128, "without ranges from 0 to 1", "promises", "random_data_without_a_range_lies_between_zero_and_one"),
        (
            131,
            131,
            "more bins, nearer thresholds; 0: all values",
            "promises",
            "bins_decide_how_exact_a_percentile_is[0]",
        ),
        (137, 137, "scales of any form", "promises", "instance_norm_with_scales_of_any_form"),
        (160, 160, "AlignPad in the flow of the NPU", "promises", "pads_share_a_position_in_the_flow_of_the_npu"),
        (168, 168, "for 8 and 16 bits only", "promises", "biases_are_copied_for_integers_only"),
        (198, 199, "4 bits run at every level", "promises", "four_bits_run_at_every_level"),
        (200, 201, "with the page's reader", "promises", "metrics_come_from_a_reader_of_get_next"),
        (206, 206, "another text means Percentile", "promises", "an_unknown_mode_of_the_weight_search_is_percentile"),
        (207, 207, "the example's block type", "effects", "block_type_of_one_tensor"),
        (209, 209, "axis for integers only", "promises", "a_block_type_cannot_have_channels"),
        (216, 216, "the recommended setting", "promises", "the_recommended_passthrough"),
        *(
            (216, 216, f"passthrough of {name}", "promises", f"passthrough[{name}]")
            for name in ("Reshape", "Transpose", "MaxPool", "Split", "Slice", "Squeeze", "Unsqueeze", "Gather")
        ),
        (217, 217, "every tensor is stated", "promises", "every_tensor_has_a_shape_on_request"),
        *((222, 222, f"type {name}", "configuration", f"spec[{name}]") for name in SPECS if name != "XInt8"),
    ],
}
STRAIGHT = (
    Row(
        "001",
        111,
        111,
        "weights in the file",
        _here("basics", "weights_are_codes_unless_float_ones_are_asked_for"),
        "codes of the real width, so that files shrink and nothing has to be collapsed; float ones on request",
    ),
    Row(
        "001", 158, 158, "groups in the ONNX flow too", _here("configuration", "granularity[Group"), "more than stated"
    ),
    Row(
        "001",
        160,
        160,
        "NonOverflow",
        "tests/observers/test_golden.py::test_non_overflow_differs_only_where_the_reference_overflows",
    ),
    Row("001", 162, 162, "FP8 caches of attention", "tests/torch_flow/test_kv_cache.py"),
    Row(
        "002",
        97,
        97,
        "4-bit weights and activations",
        "tests/torch_flow/test_svdquant.py::test_w4a4_with_outliers_loses_half_of_its_error",
    ),
    Row(
        "002",
        75,
        77,
        "UNet and transformer",
        "tests/torch_flow/test_diffusion.py::test_both_architectures_and_both_kinds_of_activations",
    ),
    Row("004", 85, 85, "models above 2 GB", "tests/onnx_flow/test_large_model.py"),
)
#: What no test of this machine can say.
UNTESTED = {"001": {167: "operating systems and accelerators: the suite runs where it is run"}}
#: page -> lines that promise nothing of their own: headings, background, figures.
SILENT = {
    "000": "1 15 17-20 81 83 85 89",
    "001": "1-10 16-28 32-42 46-48 51-61 73 75-79 82 84-88 98 100-104 110 112 114-116 125 127 129-131 135-137 139 141 "
    "149-154",
    "002": "1-6 8 10 12-14 70 72-74 78 80 83 84 93-96",
    "003": "1-8 10-18 64-66 68-70 98 102-104 123-126",
    "004": "1 2 12-19 23 27 31 35 39 43 47 51 55 59 63 64 218-221",
}


def _written() -> Iterator[Row]:
    for page, rows in WRITTEN.items():
        for first, last, about, file, test in rows:
            place = (
                f"tests/onnx_flow/{file.removeprefix('../onnx_flow/')}::test_{test}"
                if file.startswith("../")
                else _here(file, test)
            )
            yield Row(page, first, last, about, place)


ROWS = tuple(sorted((*_written(), *STRAIGHT, *_of_options()), key=lambda row: (row.page, row.first)))
