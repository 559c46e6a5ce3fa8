"""NCCL is driven by its documented sequences, and by names its real library has.

The stand-in is a C library that is compiled and loaded for real and refuses
wrong orders of calls; the real wheel is checked for prototypes and symbols, and
opened. Nothing here runs on a GPU.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.elastic.comm.vendor.library import RESPAWN_EXIT_CODE, VendorError, VendorHang
from megatron.elastic.comm.vendor.nccl import (
    ELEMENTS,
    IN_PROGRESS,
    PROTOTYPES,
    REDUCTIONS,
    NcclCommunicator,
    NcclLibrary,
)
from tests.wheels import newest

SOURCE = Path(__file__).with_name("standin_nccl.c")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("nccl")

    def compile_with(*without: str) -> Path:
        path = folder / f"libnccl{''.join(without)}.so.2"
        if not path.exists():
            flags = [f"-DNO_{name}" for name in without]
            subprocess.run(["cc", "-shared", "-fPIC", "-o", path, *flags, SOURCE], check=True, timeout=60)
        return path

    return compile_with


class Standin:
    """The stand-in as seen by the adapter and by the test."""

    def __init__(self, path: Path) -> None:
        self.library = NcclLibrary(path)
        self._raw = ctypes.CDLL(str(path))
        self._raw.standin_log.restype = ctypes.c_char_p
        self.reset()

    def reset(self, hang: bool = False) -> None:
        self._raw.standin_reset(int(hang))

    def break_connections(self, error: int) -> None:
        """Have communicators say that their connections met this ``ncclResult_t``."""
        self._raw.standin_break(error)

    def log(self) -> list[str]:
        return str(self._raw.standin_log().decode()).rstrip(";").split(";")


def survivor(standin: Standin, members: tuple[int, ...] = (0, 1, 2, 3), rank: int = 0) -> NcclCommunicator:
    communicator = NcclCommunicator(standin.library, rank, limit=5.0)
    communicator.start(members, standin.library.unique_id())
    standin.reset()
    return communicator


def shared(make: Callable[[], bytes]) -> bytes:
    """On the member that makes the bytes."""
    return make()


def received(make: Callable[[], bytes]) -> bytes:
    """On another one."""
    return b"g" * 128


def test_a_loss_is_revoke_then_shrink(build: Callable[..., Path]) -> None:
    standin = Standin(build())
    communicator = survivor(standin, rank=2)
    assert communicator.edit((0, 2, 3), shared) == "shrunk"
    assert standin.log() == ["revoke", "shrink -1 flags 0", "abort 4"]
    assert communicator.order == (0, 2, 3)
    assert communicator.edit((0, 2, 3), shared) == "kept"


def test_a_second_loss_before_the_change_revokes_nothing_again(build: Callable[..., Path]) -> None:
    """NCCL refuses to revoke what is revoked; that is no reason to make the communicator anew."""
    standin = Standin(build())
    communicator = survivor(standin)
    communicator.revoke()
    communicator.revoke()
    assert communicator.revoked and communicator.edit((0, 3), shared) == "shrunk"
    assert standin.log() == ["revoke", "shrink -1,2 flags 0", "abort 4"]


def test_without_revoke_shrink_aborts_itself(build: Callable[..., Path]) -> None:
    standin = Standin(build("REVOKE"))
    communicator = survivor(standin)
    assert communicator.edit((0, 3), shared) == "shrunk"
    assert standin.log() == ["shrink -1,2 flags 1", "abort 4"]


def test_a_newcomer_is_appended(build: Callable[..., Path]) -> None:
    standin = Standin(build())
    leader = survivor(standin, (1, 3), rank=1)
    assert leader.edit((0, 1, 3), shared) == "grown"
    assert standin.log() == ["grow id", "grow to 3 old id", "abort 2"]
    assert leader.order == (1, 3, 0)
    follower = survivor(standin, (1, 3), rank=3)
    assert follower.edit((0, 1, 3), received) == "grown"
    assert standin.log() == ["grow to 3 old", "abort 2"]
    newcomer = NcclCommunicator(standin.library, 0, limit=5.0)
    standin.reset()
    newcomer.join(leader.order, b"g" * 128)
    assert standin.log() == ["grow to 3 new id"]


def test_a_replacement_is_both(build: Callable[..., Path]) -> None:
    standin = Standin(build())
    communicator = survivor(standin)
    assert communicator.edit((0, 2, 3, 5), shared) == "replaced"
    assert [entry.split()[0] for entry in standin.log()] == ["revoke", "shrink", "abort", "grow", "grow", "abort"]
    assert communicator.order == (0, 2, 3, 5)


@pytest.mark.parametrize(("without", "members"), [(("SHRINK",), (0, 1)), (("GROW",), (0, 1, 2, 3, 7))])
def test_what_a_version_cannot_do_is_made_anew(
    build: Callable[..., Path], without: tuple[str, ...], members: tuple[int, ...]
) -> None:
    standin = Standin(build(*without))
    communicator = survivor(standin)
    assert communicator.edit(members, shared) == "rebuilt"
    assert standin.log() == ["id", "abort 4", f"init 0/{len(members)} i"]
    assert communicator.order == members


def test_an_error_of_the_librarys_own_threads_is_found(build: Callable[..., Path]) -> None:
    standin = Standin(build())
    communicator = survivor(standin)
    assert not communicator.broken()
    standin.break_connections(IN_PROGRESS)
    assert not communicator.broken()
    standin.break_connections(6)
    communicator.revoke()
    assert communicator.broken(), "a revoke does not mend it"
    communicator.close()
    assert not communicator.broken(), "nothing is connected"


def test_refusals_name_the_call(build: Callable[..., Path]) -> None:
    standin = Standin(build())
    communicator = survivor(standin, rank=3)
    with pytest.raises(VendorError, match=r"ncclCommShrink: invalid argument \(4\)"):
        communicator._shrink([3])  # itself
    communicator.close()
    communicator.close()
    with pytest.raises(VendorError, match="ncclAllReduce: invalid usage"):
        communicator.all_reduce(torch.ones(8), dist.ReduceOp.SUM)


def test_a_hanging_revoke_is_noticed_and_ends_the_process(build: Callable[..., Path]) -> None:
    standin = Standin(build())
    communicator = survivor(standin)
    communicator._limit = 0.2
    standin.reset(hang=True)
    began = time.monotonic()
    with pytest.raises(VendorHang, match="ncclCommRevoke"):
        communicator.edit((0, 1), shared)
    assert time.monotonic() - began < 30
    standin.reset()
    script = (
        "import time\nfrom megatron.elastic.comm.vendor.calls import bounded\n"
        "from megatron.elastic.comm.vendor.library import VendorHang, exit_into_respawn\n"
        "try: bounded(lambda: time.sleep(60), 0.1, 'abort')\nexcept VendorHang as hang: exit_into_respawn(hang)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=120, capture_output=True)
    assert done.returncode == RESPAWN_EXIT_CODE


def test_an_older_library_without_the_basics_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "libnccl.so.2"
    code = "const char* ncclGetErrorString(int code) { return 0; }\nint ncclGetVersion(int* v) { return 0; }\n"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", path, "-"], input=code.encode(), check=True, timeout=60)
    with pytest.raises(VendorError, match="ncclCommInitRank"):
        NcclLibrary(path)


@pytest.fixture(scope="module")
def wheel() -> zipfile.ZipFile:
    """Of 300 MB: the tests that use it are slow."""
    return newest("nvidia-nccl-cu13")


def normal(parameters: str) -> str:
    return re.sub(r"\s*\*\s*", "* ", " ".join(parameters.split()))


@pytest.mark.slow
def test_prototypes_are_those_of_the_header(wheel: zipfile.ZipFile) -> None:
    header = wheel.read("nvidia/nccl/include/nccl.h").decode()
    for name, parameters in PROTOTYPES.items():
        found = re.search(rf"ncclResult_t\s+{name}\(([^)]*)\)", header)
        assert found, f"{name} is gone from nccl.h"
        assert normal(found[1]) == normal(parameters), name
    for torch_type, number in ELEMENTS.items():
        torch_name = str(torch_type).removeprefix("torch.")
        name = {"int8": "Int8", "uint8": "Uint8", "bfloat16": "Bfloat16"}.get(torch_name) or torch_name.capitalize()
        assert re.search(rf"nccl{name}\s*=\s*{number}\b", header), name
    for op, number in REDUCTIONS.items():
        name = {"PRODUCT": "Prod"}.get(op.name, op.name.capitalize())
        assert re.search(rf"nccl{name}\s*=\s*{number}\b", header), name
    for constant, value in (("NCCL_SHRINK_ABORT", "0x01"), ("NCCL_REVOKE_DEFAULT", "0x00")):
        assert re.search(rf"#define {constant} {value}\b", header), constant
    assert "#define NCCL_UNIQUE_ID_BYTES 128" in header


@pytest.mark.slow
def test_the_real_library_opens_and_can_revoke_shrink_and_grow(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    path = Path(wheel.extract("nvidia/nccl/lib/libnccl.so.2", tmp_path))
    symbols = subprocess.run(["nm", "-D", "--defined-only", path], check=True, capture_output=True, timeout=60)
    exported = {line.split()[-1] for line in symbols.stdout.decode().splitlines()}
    assert set(PROTOTYPES) <= exported
    library = NcclLibrary(path)
    assert (library.can_revoke, library.can_shrink, library.can_grow) == (True, True, True)
    assert library.version() >= 22700
