"""Every flag of Megatron's parser is in a table, and in one alone."""

from __future__ import annotations

import argparse
from functools import cache

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron.elastic.mcore.args import flag_table
from megatron.elastic.mcore.args.features import FEATURES
from megatron.elastic.mcore.args.sub_flags import TUNED, spellings
from megatron.elastic.mcore.args.substitutions import ELASTIC_ROWS, ROWS
from megatron.elastic.mcore.args.support import classify
from megatron.elastic.mcore.args.unfit import UNFIT
from megatron.elastic.mcore.args.unread import UNREAD
from megatron.elastic.mcore.patching.releases import in_range, installed_version

pytestmark = pytest.mark.skipif(
    not in_range(installed_version(), ">=0.17.1,<0.18"), reason="the tables are complete for megatron-core 0.17.1"
)


@cache
def flags_of_the_parser() -> frozenset[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_megatron_arguments(parser)
    words = (word for action in parser._actions for word in action.option_strings)
    return frozenset(word for word in words if word.startswith("--"))


def test_each_flag_of_megatron_is_classified() -> None:
    flags = flags_of_the_parser()
    assert len(flags) > 700
    assert sorted(flag for flag in flags if classify(flag) is None) == []


def test_a_flag_that_tunes_another_is_in_no_other_table() -> None:
    tuning = [flag for flags in TUNED.values() for flag in flags]
    unread = [flag for flags in UNREAD.values() for flag in flags]
    of_features = {flag for row in FEATURES for flag in row.flags}
    of_rules = {row.flag for row in (*ROWS, *ELASTIC_ROWS)} | {row.flag for row in UNFIT if row.always}
    assert len({*tuning, *unread}) == len([*tuning, *unread])
    in_others = {flag for flag in (*tuning, *unread) if flag in flag_table.HONOURED | of_features | of_rules}
    assert in_others <= {"--moe-router-padding-for-quantization", "--moe-router-padding-for-fp8"}


def test_each_flag_of_the_new_tables_is_one_of_the_parser() -> None:
    named = {flag for flags in (*TUNED.values(), *UNREAD.values()) for flag in flags} | {row.flag for row in UNFIT}
    assert sorted(named - flags_of_the_parser()) == ["--kitchen-attention-backend", "--use-kitchen-attention"] or (
        named <= flags_of_the_parser()
    )


def test_each_tuned_flag_is_classified() -> None:
    assert [flag for flag in TUNED if classify(flag) is None] == []


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("--disable-x", ("--disable-x", "--no-x")),
        ("--no-x", ("--no-x", "--x")),
        ("--x-no-y", ("--x-no-y",)),
    ],
)
def test_spellings_of_a_switch(flag: str, names: tuple[str, ...]) -> None:
    assert spellings(flag) == names
