"""``pretrain_gpt.py`` passes on all flags of data sets that Megatron's own script passes on, and checks its losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.own_process import result_of


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return result_of(Path(__file__).with_name("dataset_settings.py"), tmp_path_factory.mktemp("settings"))


def test_data_sets_are_opened_as_their_flags_say(answers: Any) -> None:
    opened = {"fast_cache_load": True, "defer_npy_index_mmap": True, "sequences_per_dataset": {"words": [4, 5]}}
    assert answers["tokens"] == {"kind": "GPTDatasetConfig", **opened}


def test_samples_are_cut_where_the_middle_is_to_be_filled_in(answers: Any) -> None:
    cut = answers["cut"]
    assert cut["kind"] == "GPTFIMDatasetConfig" and cut["fast_cache_load"]
    assert [cut[f"fim_{name}"] for name in ("rate", "spm_rate", "fragment_rate")] == [0.25, 0.75, 0.5]
    assert (cut["fim_split_sample"], cut["fim_no_prefix"]) == ("/", "#")
    assert cut["fim_extra_tokens"] == {name: name for name in ("prefix", "middle", "suffix", "pad", "eod")}


def test_a_loss_that_is_not_finite_is_refused_without_elastic(answers: Any) -> None:
    """With it the engine decides, by the sums of all ranks."""
    one, nan, infinite = answers["losses"]
    assert one == "" and "not a number" in nan and "infinite" in infinite
    assert answers["with --elastic"] == ""
