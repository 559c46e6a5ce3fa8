"""Parameter groups have Megatron's learning rates and epsilons, also where these follow the width of the model."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from megatron.core.optimizer.optimizer_config import AdamOptimizerConfig, OptimizerConfig, SGDOptimizerConfig

from megatron.elastic.mcore.args.bad_input import BadInput
from megatron.elastic.mcore.checkpoint.state_dict import groups_in_file, told_apart
from megatron.elastic.mcore.model.param_groups import GroupKeys, with_width

LR, EPS, WIDTH = 0.8, 1e-3, 4.0
WIDE = Namespace(use_mup=True, mup_width_mult=WIDTH)


def of(name: str, shape: tuple[int, ...], keys: GroupKeys, **marks: bool) -> tuple[float, float, float]:
    """Return the highest and lowest learning rate, and the epsilon, of a parameter."""
    parameter = torch.nn.Parameter(torch.zeros(shape))
    vars(parameter).update(marks)
    index = keys.key(name, parameter).index
    group = keys.param_groups()[index]
    return group["max_lr"], group["min_lr"], keys.epsilons()[index]


def made(config: OptimizerConfig, model: Namespace) -> GroupKeys:
    return GroupKeys(config, with_width(None, config, model))


def test_matrices_inside_the_model_have_rates_and_epsilons_by_its_width() -> None:
    keys = made(AdamOptimizerConfig(lr=LR, min_lr=LR / 10, adam_eps=EPS), WIDE)
    inside = of("decoder.layers.0.mlp.linear_fc1.weight", (2, 2), keys)
    assert inside == pytest.approx((LR / WIDTH, LR / 10 / WIDTH, EPS / WIDTH))
    assert of("decoder.layers.0.input_layernorm.weight", (2,), keys) == (LR, LR / 10, EPS)
    assert of("embedding.word_embeddings.weight", (2, 2), keys) == (LR, LR / 10, EPS)
    assert of("output_layer.weight", (2, 2), keys, is_embedding_parameter=True) == (LR, LR / 10, EPS)


def test_with_sgd_it_is_the_others_rates_that_follow_the_width() -> None:
    keys = made(SGDOptimizerConfig(lr=LR, min_lr=LR / 10), WIDE)
    assert of("decoder.layers.0.mlp.linear_fc1.weight", (2, 2), keys)[:2] == (LR, LR / 10)
    assert of("embedding.word_embeddings.weight", (2, 2), keys)[:2] == (LR * WIDTH, LR / 10 * WIDTH)


def test_without_it_all_have_the_flags_values() -> None:
    keys = made(AdamOptimizerConfig(lr=LR, min_lr=LR / 10, adam_eps=EPS), Namespace(use_mup=False))
    assert of("decoder.layers.0.mlp.linear_fc1.weight", (2, 2), keys) == (LR, LR / 10, EPS)
    assert set(keys.epsilons()) == {EPS}


def in_file(*rates: float) -> list[dict[str, object]]:
    """Parameter groups of a checkpoint with these learning rates, the first one that of the flags of its job."""
    alike = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return [{**alike, "max_lr": rate, "default_config": rate == rates[0]} for rate in rates]


def test_groups_of_a_checkpoint_that_megatron_cannot_tell_apart_keep_their_learning_rates() -> None:
    mine = dict(zip((0, 1, 4), in_file(LR, 2 * LR, 3 * LR), strict=True))
    theirs = in_file(0.1, 0.2, 0.3)
    for order in ((0, 1, 2), (1, 0, 2), (1, 2, 0)):
        found = groups_in_file(mine, [theirs[at] for at in order])
        assert [found[at]["max_lr"] for at in (0, 1, 4)] == [0.1, 0.2, 0.3]


def test_a_checkpoint_with_fewer_of_them_gives_the_last_as_megatron_does() -> None:
    mine = dict(enumerate(in_file(LR, 2 * LR, 3 * LR)))
    found = groups_in_file(mine, in_file(0.1, 0.2))
    assert [found[at]["max_lr"] for at in range(3)] == [0.1, 0.2, 0.2]
    assert groups_in_file(mine, in_file(0.1)).keys() == {0}


def test_groups_are_in_megatrons_order() -> None:
    keys = GroupKeys(AdamOptimizerConfig(lr=LR, min_lr=LR / 10, decoupled_lr=2 * LR), None)
    found = [(group["max_lr"], group["wd_mult"]) for group in keys.param_groups()]
    assert found == [(LR, 1.0), (2 * LR, 1.0), (2 * LR, 0.0), (LR, 0.0)]


def test_a_checkpoint_with_another_number_of_groups_is_refused_by_one_line() -> None:
    with pytest.raises(BadInput, match=r"has 1 parameter groups, and this run 2: .* --no-load-optim$"):
        told_apart([{"wd_mult": 1.0}, {"wd_mult": 0.0}], [{"wd_mult": 1.0}])
