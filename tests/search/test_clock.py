"""The budget of time: what fits, by the longest step of a kind."""

from __future__ import annotations

import pytest

from quark.search.clock import Clock


def test_what_fits_depends_on_what_was_seen_and_on_what_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("quark.search.clock.time.perf_counter", lambda: now[0])
    clock = Clock(60.0)
    assert clock.left == 60.0 and clock.usual("trial") == 0.0 and clock.fits(60.0) and not clock.fits(60.5)
    for seconds in (5.0, 20.0, 7.0):
        with clock.during("trial"):
            now[0] += seconds
    with pytest.raises(ValueError, match="failed"), clock.during("failing"):  # a step that fails has taken its time
        now[0] += 3.0
        raise ValueError("failed")
    assert clock.usual("trial", "failing", "other") == 23.0 and clock.left == 25.0
    clock.reserved = 6.0
    assert clock.left == 19.0 and clock.fits(19.0) and not clock.fits(clock.usual("trial"))
