"""Ranks whose libraries round powers and cosines differently train together: one tells rates, powers are products."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic_job import ROOT, elastic_job

STEPS = 6
QUIET = ("--hidden-dropout", "0", "--attention-dropout", "0", "--lr-decay-iters", "8")


@pytest.mark.slow
def test_a_rank_with_another_mathematical_library_is_no_fault(tmp_path: Path) -> None:
    """And nothing that is computed depends on it, as the other rank is the one that tells."""
    usual = elastic_job(tmp_path / "usual", 2, 1, 1, STEPS, *QUIET)
    mixed = elastic_job(
        tmp_path / "mixed",
        2,
        1,
        1,
        STEPS,
        *QUIET,
        script=ROOT / "tests/integration/other_library.py",
        environment={"OTHER_RANK": "1"},
    )
    assert (usual.code, mixed.code) == (0, 0), mixed.output[-3000:]
    assert mixed.committed == usual.committed and len(mixed.committed) == STEPS
