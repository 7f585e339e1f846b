"""extra_options: typed, unknown names refused with the nearest one, every published name known."""

from pathlib import Path

import pytest

from quark.config.options import OPTIONS, parse_options
from quark.errors import ConfigError

NAMES = Path(__file__).parents[1] / "golden" / "option_names.txt"
NBITS = {"Algorithm", "GroupSize", "Symmetric", "Bits", "AccuracyLevel"}


def published() -> set[str]:
    return {line for line in NAMES.read_text().split("\n") if line and not line.startswith("#")} - NBITS


def test_every_published_option_is_there() -> None:
    assert published() <= set(OPTIONS)


def test_a_misspelt_option_shows_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'CalibMovingAvrage'. Did you mean 'CalibMovingAverage'"):
        parse_options({"CalibMovingAvrage": True})


@pytest.mark.parametrize(
    ("name", "value"),
    [("Percentile", 101.0), ("Percentile", "99"), ("CalibDataSize", 0), ("WeightsOnly", 1), ("LWPMetric", "mea")],
)
def test_a_bad_value_names_the_option_and_the_value(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"the option {name} cannot be {value!r}"):
        parse_options({name: value})


def test_every_option_has_a_line_of_documentation_and_a_group() -> None:
    for name, row in OPTIONS.items():
        assert len(row.doc) > 20, name
        assert row.group in range(1, 12), name


def test_options_do_not_change() -> None:
    with pytest.raises(AttributeError):
        parse_options({}).WeightsOnly = True  # type: ignore[misc]


def test_the_page_of_options_names_every_published_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
    assert {name for name in published() if f"`{name}`" not in page} == set()
    [nbits] = [line for line in page.split("\n") if line.startswith("| `MatMulNBitsParams`")]
    assert {name for name in NBITS if name not in nbits} == set()
