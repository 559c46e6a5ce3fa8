"""Megatron's flags for types of optimizer state: taken over where the engine keeps them, else refused in one line."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from megatron.elastic.mcore.args.moments import moment_faults, take_over_moments


def asked(**more: Any) -> Namespace:
    """Arguments as Megatron parses them."""
    types = dict.fromkeys(("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), "fp32")
    return Namespace(**{"use_precision_aware_optimizer": True, **types, **more})


def test_the_engine_takes_the_types_and_megatron_asks_for_no_other_optimizer() -> None:
    args = asked(exp_avg_dtype="bf16")
    assert not list(moment_faults(args))
    take_over_moments(args)
    assert args.elastic_moments == ("bf16", "fp32")
    assert (args.use_precision_aware_optimizer, args.exp_avg_dtype) == (False, "fp32")


def test_types_have_no_effect_without_the_optimizer_that_knows_them() -> None:
    args = asked(use_precision_aware_optimizer=False)
    take_over_moments(args)
    assert args.elastic_moments == ("fp32", "fp32")


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"exp_avg_dtype": "fp8"}, "--exp-avg-dtype fp8"),
        ({"exp_avg_sq_dtype": "fp16"}, "--exp-avg-sq-dtype fp16"),
        ({"main_params_dtype": "fp16"}, "--main-params-dtype fp16"),
    ],
)
def test_other_types_are_refused_with_the_fix(given: dict[str, Any], flag: str) -> None:
    [fault] = moment_faults(asked(**given))
    assert fault.startswith(flag) and (": use " in fault or "leave it out" in fault)
