"""Every rank derives the same failure domains from the decision, by labels and not by names of hosts."""

from __future__ import annotations

from megatron.elastic.comm.address import Address
from megatron.elastic.config import ElasticConfig
from megatron.elastic.control.membership import Decision
from megatron.elastic.control.wire import Codec, encode
from megatron.elastic.engine.generation.domains import failure_domains, placement_rules


def decision(*labels: str) -> Decision:
    """Two ranks on each host; a host a label."""
    where = {rank: Address(rank, 0, f"pod/{rank // 2}", {}, labels[rank // 2]) for rank in range(2 * len(labels))}
    return Codec[Decision](Decision).decode(encode(Decision(1, where, "start")))


def test_two_pods_of_one_machine_are_one_domain() -> None:
    found = failure_domains(decision("boot-x", "boot-y", "boot-x"))
    assert [found.nodes[rank] for rank in range(6)] == [0, 0, 1, 1, 0, 0]
    assert found.names == {0: "pod/0+pod/2", 1: "pod/1"}
    assert found.wider == {0: (), 1: ()}


def test_what_labels_begin_with_alike_is_shared() -> None:
    found = failure_domains(decision("r1/a", "r2/a", "r1/b", "r1/a"))
    rules = placement_rules(ElasticConfig(), found)
    rack, node = zip(*(rules.path(rank) for rank in (0, 2, 4, 6)), strict=True)
    assert rack[0] == rack[2] == rack[3] != rack[1]
    assert node[0] == node[3] and len(set(node)) == 3, "a is another node in another rack"


def test_labels_of_unequal_depth_name_racks_of_one_node() -> None:
    rules = placement_rules(ElasticConfig(), failure_domains(decision("r1/a", "b", "r1/c")))
    paths = [rules.path(rank) for rank in (0, 2, 4)]
    assert {len(path) for path in paths} == {2}
    assert paths[0][0] == paths[2][0] != paths[1][0]


def test_a_rank_without_a_label_is_in_the_domain_of_its_host() -> None:
    assert failure_domains(decision("", "")).nodes == {0: 0, 1: 0, 2: 1, 3: 1}


def test_ranks_that_leave_are_no_place_for_copies() -> None:
    rules = placement_rules(ElasticConfig(), failure_domains(decision("a", "b")), ranks=(0, 3))
    assert rules.domains == {0: 0, 3: 1}
