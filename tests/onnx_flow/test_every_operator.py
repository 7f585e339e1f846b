"""Every operator that ONNX documents, alone in a model, under every configuration: a right file or a sentence."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.onnx_flow.judged import EVERYTHING, judged
from tests.onnx_flow.operator_cases import Case, cases

PRESETS = ("A8W8", "A8W8_CPU", "XINT8", "A16W8", "BF16", "BFP16", "MX9", "FP8E4M3")
OTHER_MODES = ("UINT8_DYNAMIC_QUANT", "MATMUL_NBITS")
pytestmark = pytest.mark.filterwarnings("ignore")
GOOD = ("ok", "refused", "float")
#: Of 16-bit integers too much for these: rows around 10,000 whose differences count, a mask of -3e38 as an output, and
#: constants of 1,000 beside others below 1, which a mask hides.
HARD = (
    "large_number",
    "neginf_mask_poison",
    "with_past_and_present_qk_matmul_bias_3d_mask_causal",
    "qk_matmul_bias_4d_mask_causal",
)
#: A value that is a threshold, of which 8 bits have no code: what is above it jumps.
JUMPS = {"uint8": ("thresholdedrelu_example",)}
#: What no refusal of a single operator may say: it would be a fault of ours.
FAULTS = ("does not open", "fails onnx.checker", "does not run")


def faults(chosen: tuple[Case, ...], preset: str) -> tuple[list[str], Counter[str]]:
    """What went wrong, a line each, and how many cases ended how."""
    found, words = [], Counter[str]()
    for name, model, feed in chosen:
        outcome = judged(model, [feed], preset)
        words[outcome.word] += 1
        told = outcome.word == "refused" and any(fault in outcome.why for fault in FAULTS)
        hard = outcome.word == "far" and any(part in name for part in (*HARD, *JUMPS.get(preset, ())))
        if (outcome.word not in GOOD or told) and not hard:
            found.append(f"{name}: {outcome.word}: {outcome.why}")
    return found, words


def test_a_sample_of_the_operators() -> None:
    """One test for all presets: it takes seconds to make the cases, which a process does once."""
    for preset in EVERYTHING:
        found, words = faults(cases()[::131], preset)
        assert found == [], preset
        assert words["ok"] >= 9, preset


def test_pools_with_dilations_load_under_every_preset() -> None:
    """ONNX Runtime's integer AveragePool does not know them."""
    chosen = tuple(case for case in cases() if case[0] == "test_averagepool_2d_dilations")
    assert [faults(chosen, preset) for preset in ("A8W8", "XINT8")] == [([], Counter(ok=1))] * 2


def test_statistics_that_the_runtime_writes_into_inputs_leave_the_samples_alone() -> None:
    chosen = tuple(case for case in cases() if case[0] == "test_batchnorm_example_training_mode")
    assert faults(chosen, "wide") == ([], Counter(ok=1))


@pytest.mark.parametrize(
    ("part", "preset"), [("gridsample", "uint8"), ("affine_grid_3d", "A8W8_CPU"), ("affine_grid_2d", "BF16")]
)
def test_coordinates_are_not_rounded_and_bodies_hold_constants(part: str, preset: str) -> None:
    found, words = faults(tuple(case for case in cases() if part in case[0]), preset)
    assert found == [] and words["ok"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("preset", [*EVERYTHING, *PRESETS, *OTHER_MODES])
def test_every_operator(preset: str) -> None:
    found, words = faults(cases(), preset)
    assert found == []
    assert words["crash"] == 0
