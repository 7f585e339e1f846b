"""What page 004 says of every option, as facts: its line, the kind of its values, the test of its effect, its default.

``?`` behind a kind: or None. The test is a function of ``tests/onnx_flow/test_<file>.py``; with ``@`` it is one of
``tests/seeds/test_effects.py``. ``test_options.py`` compares the table with the text.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

#: line, name, kind, test of the effect, default (nothing: the text has a rule, or no default)
TABLE = """
87 PreprocessYAML string? pass_options::test_passes_before_and_after_instead_of_the_list_of_the_flow None
88 SkipPreprocess string? option_effects::test_effect[SkipPreprocess] False
89 OpTypesToQuantize strings? @selected
90 NodesToQuantize strings? @selected None
91 ExtraOpTypesToQuantize strings? option_effects::test_effect[ExtraOpTypesToQuantize]
92 ExecutionProviders strings option_effects::test_calibration_runs_on_the_providers_that_are_asked_for ['CPUExecutionProvider']
93 OptimizeModel bool option_effects::test_effect[OptimizeModel] True
94 ConvertFP16ToFP32 bool flow::test_float16_models_are_quantized_as_they_are_or_converted False
95 ConvertNCHWToNHWC bool pass_options::test_nhwc_takes_the_calibration_data_of_the_float_model False
96 DebugMode bool runtime_options::test_debug_mode_tells_every_decision False
97 CryptoMode bool runtime_options::test_crypto_mode_leaves_no_trace False
98 PrintSummary bool @summary True
99 IgnoreWarnings bool runtime_options::test_warnings_of_libraries_are_hidden_and_the_filters_stay True
100 ActivationScaled bool formats::test_scaled_bfloat16_maps_the_range_to_two False
101 WeightScaled bool formats::test_scaled_bfloat16_maps_the_range_to_two False
102 QuantizeFP16 bool flow::test_float16_models_are_quantized_as_they_are_or_converted False
103 UseFP32Scale bool @fp32_scale
104 UseUnsignedReLU bool option_effects::test_effect[UseUnsignedReLU] False
105 QuantizeBias bool @bias True
106 Int32Bias bool option_effects::test_effect[Int32Bias] False
107 Int16Bias bool overrides::test_int16_biases_are_rescaled_until_they_fit False
108 RemoveInputInit bool pass_options::test_initializers_that_a_feed_may_override_stay_float True
109 SimplifyModel bool option_effects::test_effect[SimplifyModel] True
110 SimplifyModelOptions dictionary option_effects::test_effect[SimplifyModelOptions] {}
111 EnableSubgraph bool subgraphs::test_bodies_stay_float_without_the_option False
112 EnableDualQuantNodePairs bool dual_pairs::test_any_two_formats False
113 ForceQuantizeNoInputCheck bool @force
114 MatMulConstBOnly bool place::test_matmul_of_two_activations_can_be_left_out False
115 AddQDQPairToWeight bool emit::test_float_weights_can_stay_behind_a_pair True
116 OpTypesToExcludeOutputQuantization strings? place::test_outputs_can_be_left_float_by_type_and_name []
117 NodesToExcludeOutputQuantization strings? place::test_outputs_can_be_left_float_by_type_and_name []
118 DedicatedQDQPair bool emit::test_a_pair_per_consumer_on_request False
119 QDQOpTypePerChannelSupportToAxis dictionary option_effects::test_effect[QDQOpTypePerChannelSupportToAxis] {}
120 CalibTensorRangeSymmetric bool calibration_options::test_ranges_are_symmetric_on_request_with_every_method
121 CalibMovingAverage bool option_effects::test_the_constant_of_the_moving_average_weighs_the_newest_sample False
122 CalibMovingAverageConstant float option_effects::test_the_constant_of_the_moving_average_weighs_the_newest_sample 0.01
123 Percentile float @percentile 99.999
124 LWPMetric string option_effects::test_one_far_value_is_cut_by_mean_magnitude_and_kept_by_mean_square mae
125 PercentileCandidates list option_effects::test_layerwise_percentile_takes_the_candidate_of_least_error_by_its_metric [99.99, 99.999, 99.99999]
126 UseRandomData bool flow::test_random_data_needs_no_reader_and_takes_shapes_and_ranges false
127 RandomDataReaderInputShape dictionary flow::test_random_data_has_the_shape_that_is_asked_for {}
128 RandomDataReaderInputDataRange dictionary? flow::test_random_data_needs_no_reader_and_takes_shapes_and_ranges None
129 Int16Scale bool flow::test_int16_scales_are_fractions_of_16_bit_integers False
130 MinMSEModePof2Scale string option_effects::test_the_most_common_power_of_two_of_the_samples_is_not_that_of_all All
131 NumBins int calibration_options::test_num_bins_sets_how_near_a_percentile_comes 2048
132 ConvertOpsetVersion int? option_effects::test_effect[ConvertOpsetVersion] None
133 ConvertBNToConv bool pass_options::test_a_pass_runs_when_its_option_says_so[ConvertBNToConv] True
134 ConvertReduceMeanToGlobalAvgPool bool option_effects::test_effect[ConvertReduceMeanToGlobalAvgPool]
135 SplitLargeKernelPool bool pass_options::test_a_pass_runs_when_its_option_says_so[SplitLargeKernelPool]
136 ConvertSplitToSlice bool pass_options::test_a_pass_runs_when_its_option_says_so[ConvertSplitToSlice]
137 FuseInstanceNorm bool pass_options::test_a_pass_runs_when_its_option_says_so[FuseInstanceNorm] True
138 FuseL2Norm bool pass_options::test_a_pass_runs_when_its_option_says_so[FuseL2Norm] True
139 FuseGelu bool pass_options::test_a_pass_runs_when_its_option_says_so[FuseGelu] True
140 FuseLayerNorm bool pass_options::test_a_pass_runs_when_its_option_says_so[FuseLayerNorm] True
141 ConvertClipToRelu bool pass_options::test_a_clip_becomes_a_relu_where_the_codes_cut_at_its_bound False
142 SimulateDPU bool npu_options::test_leaky_relu_has_a_slope_in_256ths True
143 ConvertLeakyReluToDPUVersion bool npu_options::test_leaky_relu_has_a_slope_in_256ths True
144 ConvertSigmoidToHardSigmoid bool npu_options::test_sigmoid_becomes_a_hard_sigmoid_with_the_devices_sixth True
145 ConvertHardSigmoidToDPUVersion bool npu_options::test_sigmoid_becomes_a_hard_sigmoid_with_the_devices_sixth True
146 ConvertAvgPoolToDPUVersion bool npu_options::test_average_pools_have_the_devices_factors True
147 ConvertClipToDPUVersion bool npu_options::test_clip_has_whole_bounds_within_a_byte False
148 ConvertReduceMeanToDPUVersion bool npu_options::test_reduce_mean_has_the_devices_factor True
149 ConvertSoftmaxToDPUVersion bool npu_options::test_softmax_is_a_bfloat16_polynomial_close_to_the_exact_one False
150 NPULimitationCheck bool npu_options::test_without_the_check_no_rule_acts True
151 MaxLoopNum int npu_options::test_rounds_are_limited 5
152 AdjustShiftCut bool npu_options::test_shift_cut_moves_a_weight_and_rounds_it_again True
153 AdjustShiftBias bool npu_options::test_shift_bias_keeps_a_small_bias_on_the_accumulator True
154 AdjustShiftRead bool npu_options::test_shift_read_brings_operands_within_seven True
155 AdjustShiftWrite bool npu_options::test_shift_swish_and_shift_write_move_the_product True
156 AdjustHardSigmoid bool npu_options::test_hard_sigmoid_reads_at_most_fifteen_and_writes_at_least_seven_bits True
157 AdjustShiftSwish bool option_effects::test_a_swish_is_held_within_its_shifter True
158 AlignConcat bool npu_options::test_aligned_operators_have_one_position True
159 AlignPool bool npu_options::test_aligned_operators_have_one_position True
160 AlignPad bool option_effects::test_what_is_moved_keeps_the_scale_of_its_source True
161 AlignSlice bool option_effects::test_what_is_moved_keeps_the_scale_of_its_source True
162 AlignTranspose bool option_effects::test_what_is_moved_keeps_the_scale_of_its_source False
163 AlignReshape bool option_effects::test_what_is_moved_keeps_the_scale_of_its_source False
164 AdjustBiasScale bool overrides::test_a_bias_of_its_own_type_gets_the_product_of_scales_or_its_own True
165 SaveAndRestore string? resume::test_a_finished_calibration_is_not_computed_again None
166 ReplaceClip6Relu bool cle::test_replace_clip6_relu_lets_it_through False
167 CopySharedInit list? option_effects::test_effect[CopySharedInit] None
168 CopyBiasInit list? option_effects::test_effect[CopyBiasInit] ["Conv", "ConvTranspose", "Gemm"]
169 RemoveQDQConvClip bool option_effects::test_effect[RemoveQDQConvClip] True
170 RemoveQDQConvRelu bool option_effects::test_effect[RemoveQDQConvRelu] True
171 RemoveQDQConvLeakyRelu bool option_effects::test_effect[RemoveQDQConvLeakyRelu] True
172 RemoveQDQConvPRelu bool option_effects::test_effect[RemoveQDQConvPRelu] True
173 RemoveQDQConvGelu bool option_effects::test_effect[RemoveQDQConvGelu] False
174 RemoveQDQMulAdd bool option_effects::test_effect[RemoveQDQMulAdd] False
175 RemoveQDQBetweenOps pairs? @between None
176 RemoveQDQInstanceNorm bool option_effects::test_effect[RemoveQDQInstanceNorm] False
177 RemoveFusedQDQ bool option_effects::test_effect[RemoveFusedQDQ] False
178 FoldBatchNorm bool pass_options::test_a_pass_runs_when_its_option_says_so[FoldBatchNorm]
179 BF16WithClip bool formats::test_bfloat16_with_clip_keeps_the_largest_numbers_finite False
180 BF16QDQToCast bool formats::test_bfloat16_can_be_plain_casts False
181 RefineBlockAxis bool formats::test_blocks_run_along_the_axis_that_is_summed True
182 FixShapes string pass_options::test_fixed_shapes_reach_every_tensor
183 FoldRelu bool pass_options::test_relus_disappear_behind_asymmetric_codes False
184 CalibDataSize int flow::test_only_as_many_samples_are_read_as_asked_for
185 CalibWorkerNum int workers::test_processes_give_the_file_of_one_worker 1
186 CalibOptimizeMem bool calibration_options::test_where_values_are_kept True
187 CalibOptimizeDisk bool calibration_options::test_where_values_are_kept True
188 SaveTensorHistFig bool calibration_options::test_figures_are_written_into_the_current_folder False
189 QuantizeAllOpTypes bool @selected False
190 WeightsOnly bool @selected False
191 AlignEltwiseQuantType bool place::test_constant_operands_have_the_type_of_the_activation_beside_them False
192 EnableVaimlBF16 bool formats::test_vaiml_keeps_rounded_weights_in_float32_and_outputs_float False
193 UseMatMulNBits bool nbits::test_the_preset_and_excluded_nodes False
194 MatMulNBitsParams dictionary nbits::test_the_preset_and_excluded_nodes
195 Algorithm string nbits::test_gptq_beats_rounding_to_nearest_on_its_data DEFAULT
196 GroupSize int nbits::test_the_runtime_computes_with_the_codes 128
197 Symmetric bool nbits::test_the_runtime_computes_with_the_codes True
198 Bits int nbits::test_the_runtime_computes_with_the_codes 4
199 AccuracyLevel int nbits::test_the_runtime_computes_with_the_codes 0
200 EvalMetrics bool runtime_options::test_metrics_are_those_of_a_comparison False
201 EvalDataReader reader runtime_options::test_metrics_are_those_of_a_comparison
202 TmpDir string calibration_options::test_where_values_are_kept None
203 UserCustomOpLibPath string @library None
204 EncryptionAlgorithm string calibration_options::test_crypto_mode_keeps_values_in_memory_or_encrypted None
205 WeightCalibrateMethod string option_effects::test_weights_are_searched_by_the_method_that_is_asked_for None
206 MinMSEModeFloatScale string option_effects::test_weights_are_searched_by_the_method_that_is_asked_for Percentile
207 TensorQuantOverrides dictionary @overrides {}
208 quant_type type overrides::test_a_type_can_be_written_in_every_way
209 axis int channel_axes::test_a_constant_has_its_scales_along_the_axis_that_it_was_told
210 scale float overrides::test_a_range_and_parameters_are_taken_as_given
211 zero_point int overrides::test_a_range_and_parameters_are_taken_as_given
212 symmetric bool @overrides
213 reduce_range bool overrides::test_a_reduced_range_uses_half_of_the_codes
214 rmax float overrides::test_a_range_and_parameters_are_taken_as_given
215 rmin float overrides::test_a_range_and_parameters_are_taken_as_given
216 CalibPassthroughOpTypes strings calibration_options::test_passthrough_operators_share_the_range_of_what_they_read []
217 FillAllValueInfo bool pass_options::test_every_tensor_of_the_result_has_a_type_and_a_shape False
"""  # noqa: E501 (a row is a row)
#: Parameters of MatMulNBitsParams, and fields of an entry of TensorQuantOverrides.
NBITS = ("Algorithm", "GroupSize", "Symmetric", "Bits", "AccuracyLevel")
OVERRIDES = ("quant_type", "axis", "scale", "zero_point", "symmetric", "reduce_range", "rmax", "rmin")


@dataclass(frozen=True)
class Stated:
    """One line of the table."""

    line: int
    name: str
    kind: str
    effect: str
    said: str

    @property
    def test(self) -> str:
        """The id of the test of its effect."""
        if self.effect.startswith("@"):
            return f"tests/seeds/test_effects.py::test_{self.effect[1:]}"
        file, _, function = self.effect.partition("::")
        return f"tests/onnx_flow/test_{file}.py::{function}"

    @property
    def default(self) -> Any:
        """The default as a value; a word that is no literal is a string."""
        try:
            return ast.literal_eval({"false": "False"}.get(self.said, self.said))
        except (ValueError, SyntaxError):
            return self.said


def _row(line: str) -> Stated:
    number, name, kind, effect, *said = line.split(" ", 4)
    return Stated(int(number), name, kind, effect, said[0] if said else "")


STATED = tuple(_row(line) for line in TABLE.strip().splitlines())
OPTIONS = tuple(row for row in STATED if row.name not in (*NBITS, *OVERRIDES))
BY_NAME = {row.name: row for row in STATED}
