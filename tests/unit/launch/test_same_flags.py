"""Nodes of a job are to have the same flags, but for paths and for what concerns a node alone."""

from __future__ import annotations

import pytest

from megatron.elastic.config import ElasticConfig, flag_name
from megatron.elastic.launch.agent.same_flags import OF_A_NODE, unlike

HERE = ("--elastic", "--lr", "1e-4", "--seed=7", "--split", "99,1,0", "--data-path", "0.5", "/disk/a", "0.5", "/disk/b")


@pytest.mark.parametrize(
    ("there", "difference"),
    [
        (HERE, ""),
        (HERE[3:] + HERE[:3], ""),
        ((*HERE[:3], "--seed", "7", *HERE[4:]), ""),
        (tuple(word.replace("/disk", "/mnt/scratch") for word in HERE), ""),
        ((*HERE, "--elastic-domain", "rack2"), ""),
        ((*HERE, "--elastic-inject=kill:rank=0,step=1,point=mid_forward"), ""),
        ((*HERE, "--lr", "1e-3"), "with --lr 1e-3, this one with --lr 1e-4"),
        ((*HERE[:1], *HERE[3:]), "without --lr, this one with --lr 1e-4"),
        ((*HERE, "--bf16"), "with --bf16, this one without --bf16"),
        ((*HERE, "--elastic-mirrors", "2"), "with --elastic-mirrors 2, this one without --elastic-mirrors"),
        (
            (*HERE[:-1], "none"),
            "with --data-path 0.5 /disk/a 0.5 none, this one with --data-path 0.5 /disk/a 0.5 /disk/b",
        ),
        ((*HERE[:-2],), "with --data-path 0.5 /disk/a, this one with --data-path 0.5 /disk/a 0.5 /disk/b"),
    ],
)
def test_a_difference_is_named(there: tuple[str, ...], difference: str) -> None:
    expected = f"node 1 was started {difference}: give all nodes the same flags" if difference else ""
    assert unlike(HERE, {0: HERE, 1: there}) == expected


def test_a_long_value_is_cut() -> None:
    line = unlike(HERE, {3: (*HERE, "--exit-signal", "x" * 500)})
    assert line.startswith("node 3 was started with --exit-signal xxx") and "…, this one without" in line


def test_the_flags_of_a_node_exist() -> None:
    assert {flag_name(field) for field in ElasticConfig.__dataclass_fields__} >= OF_A_NODE
