"""Programs that know nothing of this package run on backend ``elastic`` under torchrun."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from tests.integration.elastic_job import ROOT, environment_of

RANKS = 3
STEPS = 5


def output(
    program: str, *arguments: str, packages: Path | None = None, flags: tuple[str, ...] = (), ranks: int = RANKS
) -> str:
    """Run ``program`` on so many ranks under torchrun, and return what they print.

    ``packages``: a folder of further packages. ``flags``: of torchrun.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *flags]
    done = subprocess.run(
        [*command, program, *arguments],
        cwd=ROOT,
        env=environment_of({"PYTHONPATH": f"{ROOT}:{packages}"} if packages else None),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-6000:]}"
    return done.stdout


def trained_alone() -> float:
    """Train the examples' model on the data of all ranks in this process, and return the sum of its parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.Generator().manual_seed(rank) for rank in range(RANKS)]
    for _ in range(STEPS):
        optimizer.zero_grad()
        for generator in data:
            (model(torch.randn(4, 8, generator=generator)).square().mean() / RANKS).backward()
        optimizer.step()
    return sum(float(parameter.detach().double().sum()) for parameter in model.parameters())


def trains_the_model_of_one_process(program: str, packages: Path | None = None) -> None:
    is_the_model_of_one_process(output(f"examples/{program}.py", "elastic", packages=packages))


def is_the_model_of_one_process(printed: str) -> None:
    assert figure_of(printed) == pytest.approx(trained_alone(), rel=1e-5)


def figure_of(printed: str, ranks: int = RANKS) -> float:
    """The figure that each of the ranks has printed, the same one."""
    found = re.findall(rf"rank (\d) of {ranks} on (\w+): (\S+)", printed)
    assert {(int(rank), backend) for rank, backend, _ in found} == {(rank, "elastic") for rank in range(ranks)}
    (figure,) = {float(value) for _, _, value in found}
    return figure


@pytest.mark.parametrize("program", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_program_of_torchs_own_trains_the_model_of_one_process(program: str) -> None:
    trains_the_model_of_one_process(program)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "point"),
    [(1, "reduction"), (0, "reduction"), (2, "barrier")],
)
def test_a_killed_worker_is_an_error_for_the_others_and_torchrun_starts_them_again(
    tmp_path: Path, lost: int, point: str
) -> None:
    """torchrun looks at its workers only every 15 s here: until then no process but the lost one's peers acts.

    A peer that waited for the lost rank any longer would be ended by torchrun, and could write no error.
    """
    flags = ("--max-restarts", "1", "--monitor-interval", "15")
    arguments = (str(tmp_path), str(lost), point)
    is_the_model_of_one_process(output("tests/integration/restarted_ddp.py", *arguments, flags=flags))
    errors = {path.name: path.read_text() for path in tmp_path.glob("error*")}
    assert set(errors) == {f"error0.rank{rank}" for rank in range(RANKS) if rank != lost}
    for text in errors.values():
        assert f"rank {lost}" in text or "lost" in text, text
    continued = {(tmp_path / f"attempt1.rank{rank}").read_text() for rank in range(RANKS)}
    assert continued == {"2" if point == "reduction" else "3"}, "the second attempt goes on from the checkpoint"


def installed(name: str, folder: Path) -> Path:
    """``folder``, with the packages of ``requirements/NAME.txt``: the environment that trains stays as it is."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, "-r", str(ROOT / "requirements" / f"{name}.txt")], check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Accelerate and Lightning."""
    return installed("trainers", tmp_path_factory.mktemp("trainers"))


@pytest.mark.slow
@pytest.mark.parametrize("program", ["accelerate_ddp", "lightning_ddp"])
def test_a_trainer_of_others_trains_the_model_of_one_process(program: str, trainers: Path) -> None:
    trains_the_model_of_one_process(program, trainers)


@pytest.mark.slow
def test_torchtitans_sharding_trains_the_model_of_one_process(tmp_path: Path) -> None:
    """Its FSDP2 divides gradients by ``PREMUL_SUM``."""
    packages, program = installed("torchtitan", tmp_path), "examples/torchtitan_fsdp.py"
    alone = figure_of(output(program, packages=packages, ranks=1), ranks=1)
    assert figure_of(output(program, packages=packages)) == pytest.approx(alone, rel=1e-5)
    assert alone < 0.6 * math.log(2048), "it has learned its one batch"


CHECKPOINTS = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("elastic")
given = {"weight": torch.arange(32.0).view(4, 8), "bias": torch.ones(4)}
model = torch.nn.Linear(8, 4)
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(model, dict(given) if dist.get_rank() == 0 else {}, options=whole)
saving = dcp.async_save(model.state_dict(), checkpoint_id=sys.argv[1], process_group=dist.new_group())
model(torch.ones(8)).sum().backward()
saving.result()
loaded = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
dcp.load(loaded, checkpoint_id=sys.argv[1])
assert all(torch.equal(value.full_tensor(), given[name]) for name, value in loaded.items())
print("done\\n", end="", flush=True)
dist.destroy_process_group()
"""


def test_torchs_checkpoints_hold_a_sharded_model_and_are_saved_beside_its_steps(tmp_path: Path) -> None:
    """The state of the whole model comes from rank 0; torch asks for the group's devices in both."""
    (tmp_path / "checkpoints.py").write_text(CHECKPOINTS)
    printed = output(str(tmp_path / "checkpoints.py"), str(tmp_path / "saved"), ranks=2)
    assert printed.split().count("done") == 2


ENDING = """
import atexit, contextlib, os, sys, time
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

def ours(ended=True):
    deadline = time.monotonic() + 10
    while (more := len(os.listdir("/proc/self/task")) > threads) and ended and time.monotonic() < deadline:
        time.sleep(0.01)  # a detached thread is listed for a moment after its end
    return distributed_c10d._new_group_with_tag is not stock, more

def say(when, ended=True):
    os.write(1, f"{when} {ours(ended)}\\n".encode())  # at once: ranks share the pipe

stock = distributed_c10d._new_group_with_tag
torch.ones(2).sum()
threads = len(os.listdir("/proc/self/task"))
atexit.register(say, "at exit")
dist.init_process_group("elastic")
value = torch.ones(4)
dist.all_reduce(value)
say("in use", ended=False)
if dist.get_rank() == 1:
    time.sleep(0.5)
work = dist.all_reduce(value, async_op=True)
if dist.get_rank() == 1:
    with contextlib.suppress(RuntimeError):  # the others may have ended it
        work.wait()
del value, work
if sys.argv[1] == "destroyed":
    dist.destroy_process_group()
    say("destroyed")
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value, group=dist.new_group([0, 1, 2]))
    assert value.item() == 3
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["destroyed", pytest.param("left", marks=pytest.mark.slow)])
def test_neither_a_thread_nor_a_replaced_function_outlives_the_group(tmp_path: Path, how: str) -> None:
    """A collective is still under way at the end.

    A thread that drops a tensor while the interpreter exits would abort the process.
    """
    (tmp_path / "ending.py").write_text(ENDING)
    lines = Counter(line.strip() for line in output(str(tmp_path / "ending.py"), how).splitlines())
    end = "destroyed (False, False)" if how == "destroyed" else "at exit (False, False)"
    assert lines["in use (True, True)"] == lines[end] == RANKS, lines


AGAIN = """
import time
import torch
import torch.distributed as dist
for count in range(4):
    dist.init_process_group("elastic")
    value = torch.ones(4)
    dist.all_reduce(value)
    assert value[0] == dist.get_world_size()
    time.sleep(0.2 * ((dist.get_rank() + count) % 2))
    dist.destroy_process_group()
print("done\\n", end="", flush=True)
"""


@pytest.mark.slow
def test_a_program_makes_its_group_again_and_again(tmp_path: Path) -> None:
    """Though some ranks destroy it later than others make the next."""
    (tmp_path / "again.py").write_text(AGAIN)
    assert output(str(tmp_path / "again.py")).split() == ["done"] * RANKS


def test_torch_is_imported_all_the_same_where_this_package_is_hidden() -> None:
    """Older forks of Megatron-LM have ``megatron/__init__.py``, which hides all other parts of ``megatron``."""
    program = (
        "import sys; sys.modules['megatron.elastic'] = None; "
        "import torch; print(hasattr(torch.distributed.Backend, 'ELASTIC'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment_of(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr[-3000:]
    assert "torch's backend 'elastic' is not available" in done.stderr


def test_importing_torch_makes_the_name_known_and_imports_no_communication() -> None:
    (ours,) = [entry for entry in entry_points(group="torch.backends") if entry.name == "megatron_elastic"]
    assert ours.value == "megatron_elastic_torch:register"
    program = "import torch, sys; print(hasattr(torch.distributed.Backend, 'ELASTIC'), *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment_of(), capture_output=True, text=True, timeout=60, check=True
    )
    known, *modules = done.stdout.split()
    assert known == "True"
    package = [name for name in modules if name.startswith("megatron.")]
    assert package == ["megatron.elastic", "megatron.elastic.comm", "megatron.elastic.comm.entry_point"]
