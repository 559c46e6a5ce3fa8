"""Ranks that share the sequence train as one rank does, lose parts of it, and have all of them again.

Plain Megatron has no context parallelism on a CPU. So each job goes on from a checkpoint of plain Megatron on one rank
(its initial weights depend on the context-parallel size), and has that run's losses, whatever is lost in it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic_job import MODEL, JobResult, elastic_job
from tests.integration.test_cpu_layouts import logs, losses, run_jobs
from tests.scenario.scenario import EXPERTS, Layout, Scenario

STEPS, FIRST = 8, 2
ROUNDING = 2e-6
FLAGS = (
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--position-embedding-type", "rope"),
    *("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"),
)
SEQUENCE = ("--sequence-parallel",)
LAYOUTS = {"cp2": (2, 1, 1, 2), "cp2pp2": (4, 1, 2, 2), "cp2dp2": (4, 1, 1, 2), "tp2cp2": (4, 2, 1, 2)}
"""Name → ranks, tensor-parallel size, stages, parts."""
OF_FOUR = {"cp4": (4, 1, 1, 4), "cp4pp2": (8, 1, 2, 4)}
"""The same of jobs that cut the sequence in four: a cell that loses a rank cuts it in three."""
POINTS = ("mid_forward", "mid_backward", "mid_reduce", "after_vote", "mid_update")
ROUTED = (*EXPERTS, "--moe-z-loss-coeff", "1e-3")
SHARING = {
    "cp2dp2ep1": (4, 1, 1, 2),
    "cp2dp2ep2": (4, 1, 1, 2),
    "cp2dp2ep4": (4, 1, 1, 2),
    "cp2pp2ep2": (4, 1, 2, 2),
    "tp2cp2dp2ep4": (8, 2, 1, 2),
}
"""Of models with experts, which as many ranks share as the name's last number says, or tensor-parallel groups."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of plain Megatron on one rank: its log, and a checkpoint in it."""
    return run_of_plain(tmp_path_factory.mktemp("plain"), 1)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with experts, which two ranks share."""
    return run_of_plain(tmp_path_factory.mktemp("routed"), 2, *ROUTED, "--expert-model-parallel-size", "2")


def run_of_plain(folder: Path, world: int, *flags: str) -> Path:
    """Run plain Megatron on ``world`` ranks in ``folder``, from a checkpoint of its first steps on."""
    folder.mkdir(exist_ok=True)
    saved, train = str(folder / "saved"), [*MODEL, *FLAGS, *flags, "--train-iters", str(STEPS)]
    begins = [*train, "--save", saved, "--save-interval", str(FIRST), "--exit-interval", str(FIRST)]
    for name, arguments in (("begins", begins), ("plain", [*train, "--load", saved])):
        codes = run_jobs(folder, [{"name": name, "world": world, "seconds": 240, "arguments": arguments}])
        assert set(codes[name]) == {0}, logs(folder, name)[-4000:]
    return folder


def shared(folder: Path, plain: Path, name: str, *flags: str) -> JobResult:
    """The same run from its step 2 on, on ranks that share the sequence."""
    world, tensor, stages, parts = (LAYOUTS | OF_FOUR | SHARING)[name]
    load = ("--load", str(plain / "saved"), "--context-parallel-size", str(parts))
    return elastic_job(folder, world, tensor, stages, STEPS, *FLAGS, *load, *flags)


def assert_as_plain(plain: Path, result: JobResult) -> None:
    """Every loss after the checkpoint is plain Megatron's, and no step was lost."""
    assert result.code == 0, result.output[-6000:]
    reference = losses(logs(plain, "plain"))
    found = result.losses
    assert found.keys() == set(range(FIRST + 1, STEPS + 1))
    assert max(abs(found[step] / reference[step] - 1) for step in found) <= ROUNDING
    assert all(record.fields["lost_steps"] == 0 for record in result.of("recovery"))


def faults(*words: str) -> tuple[str, ...]:
    """Flags for these faults."""
    return ("--elastic-allow-inject", "--elastic-inject", ";".join(words))


def test_a_part_of_the_sequence_is_lost_and_comes_back(tmp_path: Path, plain: Path) -> None:
    lost = "kill:rank=1,step=4,point=mid_backward"
    waits = Scenario(Layout(1, 1, 1), back="boundary").lingering
    result = shared(tmp_path / "job", plain, "cp2", *faults(lost, waits))
    assert_as_plain(plain, result)
    assert "rank 0 goes on" in result.output
    assert "joined by 1" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cp2pp2", *OF_FOUR])
def test_a_part_of_the_last_stage_is_lost_and_comes_back(tmp_path: Path, plain: Path, name: str) -> None:
    """The others' group is then not the one that Megatron made for them."""
    last = (LAYOUTS | OF_FOUR)[name][0] - 1
    waits = Scenario(Layout(1, 1, 1), back="boundary").lingering
    result = shared(tmp_path / "job", plain, name, *faults(f"kill:rank={last},step=4,point=mid_backward", waits))
    assert_as_plain(plain, result)
    assert f"joined by {last}" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), SEQUENCE], ids=["whole", "sequence parallel"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_megatrons(tmp_path: Path, plain: Path, name: str, flags: tuple[str, ...]) -> None:
    if flags and not name.startswith("tp"):
        pytest.skip("without tensor parallelism there is no sequence parallelism")
    assert_as_plain(plain, shared(tmp_path / "job", plain, name, *flags))


CASES = [
    (name, rank, POINTS[(rank + at) % len(POINTS)])
    for at, (name, (world, *_)) in enumerate(LAYOUTS.items())
    for rank in range(world)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rank", "point"), CASES)
def test_each_rank_may_be_lost(tmp_path: Path, plain: Path, name: str, rank: int, point: str) -> None:
    result = shared(tmp_path / "job", plain, name, *faults(f"kill:rank={rank},step=4,point={point}"))
    assert_as_plain(plain, result)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING)
def test_losses_are_megatrons_where_ranks_share_experts_too(tmp_path: Path, routed: Path, name: str) -> None:
    """A cell that loses a rank waits for it: its experts, if other cells share them, and its samples go to those."""
    reference = run_of_plain(tmp_path / "plain", 1, *ROUTED) if name.endswith("ep1") else routed
    flags = (*ROUTED, "--expert-model-parallel-size", name[-1], *SEQUENCE * name.startswith("tp"))
    waits = Scenario(Layout(1, 1, 1), back="boundary").lingering
    lost = faults("kill:rank=1,step=4,point=mid_backward", "kill:rank=2,step=6,point=after_vote", waits)
    result = shared(tmp_path / "job", reference, name, *flags, *lost)
    assert_as_plain(reference, result)
    assert {record.fields["lost_rank"] for record in result.of("loss")} == {1, 2}
    assert "joined by 1" in result.output and "joined by 2" in result.output


@pytest.mark.slow
def test_plain_megatron_goes_on_from_a_checkpoint_of_ranks_that_share_the_sequence(tmp_path: Path, plain: Path) -> None:
    saved, middle = str(tmp_path / "saved"), 4
    save = ("--save", saved, "--save-interval", str(middle), "--exit-interval", str(middle))
    assert shared(tmp_path / "job", plain, "cp2dp2", *save).code == 0
    arguments = [*MODEL, *FLAGS, "--train-iters", str(STEPS), "--load", saved]
    codes = run_jobs(tmp_path, [{"name": "on", "world": 1, "seconds": 240, "arguments": arguments}])
    assert set(codes["on"]) == {0}, logs(tmp_path, "on")[-4000:]
    reference, found = losses(logs(plain, "plain")), losses(logs(tmp_path, "on"))
    assert found.keys() == set(range(middle + 1, STEPS + 1))
    del found[middle + 2]  # Megatron's second line after a start has the mean of two steps
    assert max(abs(found[step] / reference[step] - 1) for step in found) <= ROUNDING
