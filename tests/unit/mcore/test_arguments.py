"""The command line: frozen, derived from the dataclass, one-line errors, documentation that is current."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

import pytest

from megatron.elastic.config import ConfigError, ElasticConfig
from megatron.elastic.mcore.args import arguments
from megatron.elastic.mcore.args.arguments import add_arguments, chained, config_from_args, docs, field_help
from megatron.elastic.mcore.args.bad_input import BadInput, Faults

ROOT = Path(__file__).resolve().parents[3]

FROZEN = {
    "--elastic": False,
    "--elastic-comm": "elastic",
    "--elastic-transport": "auto",
    "--elastic-mirrors": 1,
    "--elastic-domain": None,
    "--elastic-scatter-width": 4,
    "--elastic-ownership": "interleaved",
    "--elastic-block-bytes": None,
    "--elastic-snapshot": "gradient",
    "--elastic-overlap": "none",
    "--elastic-bucket-elements": 1 << 20,
    "--elastic-state": "auto",
    "--elastic-policy": "elaswave",
    "--elastic-tensor": "auto",
    "--elastic-schedule": "1f1b",
    "--elastic-fail-slow": "auto",
    "--elastic-frequency": "off",
    "--elastic-frequency-boost": False,
    "--elastic-exact": False,
    "--elastic-secret-file": None,
    "--elastic-detection-timeout": 1.0,
    "--elastic-dashboard": None,
    "--elastic-metrics": None,
    "--elastic-web-token-file": None,
    "--elastic-webhook": None,
    "--elastic-webhook-file": None,
    "--elastic-notices": None,
    "--elastic-health": None,
    "--elastic-max-losses-per-hour": 0,
    "--elastic-quarantine-after": 3,
    "--elastic-respawn": True,
    "--elastic-migrate-after": None,
    "--elastic-expert-balance": "off",
    "--elastic-expert-replicas": 1,
    "--elastic-mean-time-between-losses": 3600.0,
    "--elastic-migration": "background",
    "--elastic-spares": 0,
    "--elastic-verify-interval": 100,
    "--elastic-background-save": True,
    "--elastic-strict-flags": False,
    "--elastic-check": False,
    "--elastic-print-patches": False,
    "--elastic-event-log": None,
    "--elastic-trace": False,
    "--elastic-inject": None,
    "--elastic-allow-inject": False,
}


def parser() -> argparse.ArgumentParser:
    return add_arguments(argparse.ArgumentParser(allow_abbrev=False))


def test_the_command_line_is_frozen() -> None:
    """A flag added, renamed or given another default is a decision: change this table with it."""
    options = {action.option_strings[0]: action.default for action in parser()._actions if action.dest != "help"}
    assert options == FROZEN


def test_no_flag_given_is_the_default_configuration() -> None:
    assert config_from_args(parser().parse_args([])) == ElasticConfig()


def test_flags_arrive_in_the_configuration_with_their_types() -> None:
    words = [
        "--elastic",
        "--elastic-mirrors",
        "2",
        "--elastic-detection-timeout",
        "0.5",
        "--no-elastic-respawn",
        "--elastic-exact",
        "--elastic-comm",
        "gloo",
        "--elastic-event-log",
        "events",
    ]
    args = parser().parse_args(words)
    assert args.elastic
    expected = ElasticConfig(
        mirrors=2, detection_timeout=0.5, respawn=False, exact=True, comm="gloo", event_log="events"
    )
    assert config_from_args(args) == expected


def test_every_field_has_help() -> None:
    texts = field_help(ElasticConfig)
    assert [field.name for field in fields(ElasticConfig) if not texts.get(field.name)] == []


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--elastic-mirrors", "-1"], "--elastic-mirrors"),
        (["--elastic-block-bytes", "1000"], "--elastic-block-bytes"),
        (["--elastic-inject", "kill:rank=1"], "--elastic-allow-inject"),
        (["--elastic-frequency-boost"], "--elastic-frequency-boost"),
    ],
)
def test_a_setting_that_cannot_be_names_its_flag_in_one_line(words: list[str], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag) as caught:
        config_from_args(parser().parse_args(words))
    assert "\n" not in str(caught.value)


def test_a_misspelt_setting_is_refused_not_ignored() -> None:
    with pytest.raises(BadInput, match="--elastic-mirors"):
        config_from_args(Namespace(elastic=True, elastic_mirors=2))


@pytest.mark.parametrize("words", [["--elastic-mirors", "2"], ["--elastic-mirrors", "two"], ["--elastic-comm", "mpi"]])
def test_a_word_the_parser_cannot_take_is_one_line(words: list[str]) -> None:
    faults = Faults()
    made = chained(None, faults)(argparse.ArgumentParser(allow_abbrev=False))
    with pytest.raises(BadInput) as caught:
        made.parse_args(words)
        faults.raise_if_any()
    assert words[0] in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_flag_is_answered_with_the_nearest_known_one() -> None:
    faults = Faults()
    chained(None, faults)(argparse.ArgumentParser(allow_abbrev=False)).parse_args(
        ["--elastic-mirors", "2", "--elastic", "--elastc-comm=gloo"]
    )
    with pytest.raises(BadInput) as caught:
        faults.raise_if_any()
    assert [text.split(" (")[0] for text in caught.value.texts] == [
        "unrecognized argument --elastic-mirors",
        "unrecognized argument --elastc-comm",
    ]
    assert "did you mean --elastic-mirrors?" in caught.value.texts[0]


def test_the_scripts_own_flags_are_kept() -> None:
    def own(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--my-flag", type=int)
        return parser

    args = chained(own, Faults())(argparse.ArgumentParser()).parse_args(["--my-flag", "3", "--elastic"])
    assert (args.my_flag, args.elastic) == (3, True)


def test_adding_the_flags_twice_is_adding_them_once() -> None:
    assert len(add_arguments(parser())._actions) == len(parser()._actions)


PARSE_THEN_HELP = """
import inspect, sys
import megatron.elastic.adaptor
from megatron.training import arguments
looked_up, look_up = [], inspect.getsource
inspect.getsource = lambda thing: looked_up.append(thing) or look_up(thing)
sys.argv = ["script", "--seed", "7"]
assert arguments.parse_args(ignore_unknown_args=True).seed == 7
assert not [thing for thing in looked_up if not thing.__module__.startswith("megatron.elastic")], looked_up
sys.argv = ["script", "--help"]
arguments.parse_args()
"""


def test_megatrons_help_texts_are_looked_up_for_help_alone() -> None:
    """They are docstrings in its sources, which would be parsed twice at every start."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "1000", "ELASTIC_PLATFORM": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PARSE_THEN_HELP],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "--elastic-mirrors" in done.stdout
    assert "number of samples to linearly warmup learning rate over." in done.stdout


def test_the_flag_reference_is_current() -> None:
    assert (ROOT / "docs/flags.md").read_text() == docs(), "run " + arguments.__doc__.split("\n\n")[1].strip()
