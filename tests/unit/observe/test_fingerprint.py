"""Fingerprints see every bit of a Megatron checkpoint and of a run's steps, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.elastic.observe.event_kinds import PhasesEvent, StepEvent
from megatron.elastic.observe.events import EventLog
from megatron.elastic.state.manifest import MANIFEST, Manifest, files_below, hash_of
from megatron.elastic.state.record import StepRecord
from tools.fingerprint import checkpoint_fingerprint, fingerprint, main, tensor_hash, total

# Megatron's own writer, in a process of its own: it starts helpers that live as long as the process.
SAVE = """
import sys

def tensors(nudge):
    import torch
    g = torch.Generator().manual_seed(1)
    weight, mean, square = torch.randn(3, 8, 6, generator=g)
    square = square.bfloat16()
    if nudge:
        square.view(torch.int16)[5, 3] ^= 1
    return {
        "layers.weight": weight, "optimizer.exp_avg.layers.weight": mean,
        "optimizer.exp_avg_sq.layers.weight": square
    }

def save(rank, size, path, nudge, rng):
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(path + ".store", size))
    state = {name: ShardedTensor.from_rank_offsets(name, whole.chunk(size)[rank].clone(), (0, rank, size))
             for name, whole in tensors(nudge).items()}
    state["rng"] = ShardedObject("rng_state", {"state": rng}, (size,), (rank,))
    state["iteration"] = 5
    dist_checkpointing.save(state, path)
    dist.barrier()
    dist.destroy_process_group()

def main():
    import multiprocessing
    from pathlib import Path
    from megatron.elastic.platform.select import select
    select("cpu").prepare()
    import megatron.core.dist_checkpointing  # once, before the ranks are forked
    for name, size, nudge, rng in (("one", 1, False, 0), ("two", 2, True, 3)):
        root = Path(sys.argv[1]) / name
        path = root / "iter_0000005"
        path.mkdir(parents=True)
        ranks = [multiprocessing.get_context("fork").Process(target=save, args=(r, size, str(path), nudge, rng))
                 for r in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
            assert rank.exitcode == 0
        (root / "latest_checkpointed_iteration.txt").write_text("5")

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    script = folder / "save.py"
    script.write_text(SAVE)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {"one rank": folder / "one", "two ranks, one bit off": folder / "two"}


def test_one_bit_of_optimizer_state_is_found_and_sharding_is_not(checkpoints, capsys):
    one, two = checkpoints.values()
    assert main([str(one), "--compare", str(two)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "differs: optimizer.exp_avg_sq.layers.weight"
    assert json.loads(lines[-1]) == {"equal": False, "differences": 1, "entries": [3, 3]}


def test_the_newest_iteration_is_taken_and_equals_itself(checkpoints):
    one, two = checkpoints.values()
    hashes = fingerprint(one)
    assert fingerprint(one / "iter_0000005") == hashes and len(hashes) == 3
    assert total(hashes) != total(fingerprint(two))
    assert main([str(one), "--compare", str(one / "iter_0000005")]) == 0


def test_a_file_that_is_not_as_the_manifest_says_is_an_error(checkpoints, tmp_path, capsys):
    checkpoint = tmp_path / "iter_0000005"
    shutil.copytree(checkpoints["one rank"] / "iter_0000005", checkpoint)
    assert main([str(checkpoint)]) == 0
    plain = json.loads(capsys.readouterr().out.splitlines()[-1])
    files = {name: hash_of(checkpoint / name) for name in files_below(checkpoint)}
    (checkpoint / MANIFEST).write_text(Manifest(1, 0, StepRecord(5).to_json(), "", files).to_text())
    assert main([str(checkpoint)]) == 0
    verified = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (plain["verified"], verified["verified"]) == (None, len(files)) and plain["total"] == verified["total"]
    data = bytearray((checkpoint / "common.pt").read_bytes())
    data[-1] ^= 1
    (checkpoint / "common.pt").write_bytes(data)
    assert main([str(checkpoint)]) == 2
    assert "common.pt is not what was written" in capsys.readouterr().err


def test_objects_are_hashed_on_request_only(checkpoints):
    plain = checkpoint_fingerprint(checkpoints["one rank"])
    full = checkpoint_fingerprint(checkpoints["one rank"], objects=True)
    assert plain.items() < full.items() and "object common.pt" in full
    assert full == checkpoint_fingerprint(checkpoints["one rank"], objects=True)
    assert full != checkpoint_fingerprint(checkpoints["two ranks, one bit off"], objects=True)


def test_an_unfinished_checkpoint_is_refused(checkpoints, tmp_path, capsys):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    (tmp_path / "iter_0000007").mkdir()
    assert main([str(tmp_path)]) == 2
    assert "not a complete torch_dist checkpoint" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2


def test_hashes_see_bits_shape_and_dtype():
    zero, one = torch.zeros(4), torch.ones(4)
    alike = {tensor_hash(zero), tensor_hash(torch.zeros(4)), tensor_hash(torch.zeros(8)[::2])}
    assert len(alike) == 1
    others = [zero, -zero, zero.view(2, 2), zero.to(torch.int32), zero.bfloat16(), one, torch.zeros(0), torch.zeros(())]
    assert len({tensor_hash(tensor) for tensor in others}) == len(others)


def log(folder: Path, rank: int, losses: list[float], **changes: object) -> None:
    events = EventLog(folder, rank, incarnation=int(changes.pop("incarnation", 0)))  # type: ignore[call-overload]
    for step, loss in enumerate(losses, 1):
        events.write(PhasesEvent(step, {"compute": rank}))
        fields: dict[str, object] = {"seconds": 0.1 * rank, "ledger": f"{step:x}", "grad_norm": 1.5, **changes}
        events.write(StepEvent(step, (8 * step - 8, 8 * step), losses={"lm loss": loss}, **fields))  # type: ignore[arg-type]
    events.close()


def test_runs_that_computed_the_same_have_the_same_steps(tmp_path):
    quiet, disturbed, other = tmp_path / "quiet", tmp_path / "disturbed", tmp_path / "other"
    log(quiet, 0, [4.0, 3.0, 2.5])
    for rank in (0, 1):
        log(disturbed, rank, [4.0, 3.0, 2.5], attempts=2, incarnation=rank)
    log(other, 0, [4.0, 3.0, 2.5000000000000004])
    assert fingerprint(quiet) == fingerprint(disturbed) and len(fingerprint(quiet)) == 3
    assert main([str(quiet), "--compare", str(disturbed)]) == 0
    changed = [name for name, value in fingerprint(other).items() if value != fingerprint(quiet)[name]]
    assert changed == ["step 0000003"]


def test_samples_and_ledger_belong_to_a_step(tmp_path):
    base, moved = tmp_path / "base", tmp_path / "moved"
    log(base, 0, [4.0])
    log(moved, 0, [4.0], ledger="beef")
    assert fingerprint(base) != fingerprint(moved)


def test_ranks_that_disagree_are_named(tmp_path, capsys):
    log(tmp_path, 0, [4.0, 3.0])
    log(tmp_path, 1, [4.0, 3.1])
    assert main([str(tmp_path)]) == 2
    assert "step 2: rank" in capsys.readouterr().err
