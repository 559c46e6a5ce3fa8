"""Megatron's flags for overlap become the engine's settings, with ``--elastic`` alone."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from megatron.elastic.config import ConfigError, ElasticConfig
from megatron.elastic.engine.settings import OverlapSettings
from megatron.elastic.mcore.args.arguments import config_from_args
from megatron.elastic.mcore.args.overlap import take_over_overlap, without_overlap


def asked(elastic: bool = True, **more: Any) -> Namespace:
    plain = {"overlap_grad_reduce": False, "overlap_param_gather": False, "ddp_bucket_size": None}
    return Namespace(**{"elastic": elastic, "elastic_overlap": "none", **plain, **more})


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({}, OverlapSettings(False, False, 1 << 20)),
        ({"overlap_grad_reduce": True}, OverlapSettings(True, False, 1 << 20)),
        ({"overlap_grad_reduce": True, "overlap_param_gather": True}, OverlapSettings(True, True, 1 << 20)),
        ({"elastic_overlap": "gather", "overlap_grad_reduce": True}, OverlapSettings(True, True, 1 << 20)),
        ({"elastic_overlap": "gather", "ddp_bucket_size": 7}, OverlapSettings(False, True, 7)),
    ],
)
def test_flags_of_megatron_mean_the_same_to_the_engine(flags: dict[str, Any], found: OverlapSettings) -> None:
    args = asked(**flags)
    for _ in range(2):  # Megatron parses more than once
        take_over_overlap(args)
        ours = config_from_args({k: v for k, v in vars(args).items() if k.startswith("elastic_")})
        assert OverlapSettings.of(ours) == found
        assert not args.overlap_grad_reduce and not args.overlap_param_gather and args.ddp_bucket_size is None


def test_without_elastic_they_stay_megatrons() -> None:
    args = asked(False, overlap_grad_reduce=True, ddp_bucket_size=7)
    take_over_overlap(args)
    assert args.overlap_grad_reduce and args.ddp_bucket_size == 7 and args.elastic_overlap == "none"


def test_a_bucket_without_elements_is_refused_by_both_names() -> None:
    with pytest.raises(ConfigError, match=r"--elastic-bucket-elements.*--ddp-bucket-size"):
        ElasticConfig(bucket_elements=0)


@pytest.mark.parametrize(("overlap", "told"), [("none", False), ("gather", False), ("reduce", True), ("both", True)])
def test_exact_mode_says_that_it_reduces_nothing_behind_the_backward(overlap: Any, told: bool) -> None:
    lines = without_overlap(ElasticConfig(overlap=overlap, exact=True))
    assert [line.split(":")[0] for line in lines] == [f"--elastic-overlap {overlap} with --elastic-exact"] * told
    assert not without_overlap(ElasticConfig(overlap=overlap))
