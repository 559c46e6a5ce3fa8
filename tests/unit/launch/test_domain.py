"""A node's failure domain: as given, else the machine that it runs on, whatever its pods are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.elastic.control import env
from megatron.elastic.launch.arguments import BadCommand, parse
from megatron.elastic.launch.domain import domain_of


def test_the_flag_wins_over_the_environment_and_that_over_the_machine() -> None:
    assert domain_of("rack7/host12", {env.DOMAIN: "elsewhere"}) == "rack7/host12"
    assert domain_of(None, {env.DOMAIN: "rack7/host12"}) == "rack7/host12"
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert domain_of(None, {}) == domain_of(None, {env.DOMAIN: "", "HOSTNAME": "pod-3"}) == machine


def test_launchers_of_one_machine_are_in_one_domain(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    both = (["--nnodes", "2", "--node-rank", str(i), "--local-addr", f"pod-{i}", str(script)] for i in (0, 1))
    pods = [parse(argv, {env.SECRET: "ab" * 16}) for argv in both]
    assert pods[0].local_addr != pods[1].local_addr and pods[0].domain == pods[1].domain
    given = parse([str(script), "--elastic", "--elastic-domain", "rack1/a"], {env.DOMAIN: "b"})
    assert given.domain == "rack1/a"


@pytest.mark.parametrize("label", ["rack1//a", "/a", "a/", " a", "a\nb", "x" * 201])
def test_what_names_no_domain_is_refused_in_one_line(tmp_path: Path, label: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(BadCommand, match=r"^--elastic-domain takes names.*like rack7/host12") as refused:
        parse([str(script), "--elastic", "--elastic-domain", label], {})
    assert "\n" not in str(refused.value)
    with pytest.raises(BadCommand, match=f"^{env.DOMAIN} takes names"):
        parse([str(script)], {env.DOMAIN: label})


def test_a_machine_without_a_boot_id_needs_a_label(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give --elastic-domain"):
        domain_of(None, {}, tmp_path / "none")
