"""A user of the built wheel needs no checkout: programs, scripts and the torchx component come with it.

The wheel is installed into a virtual environment of its own. What it requires is seen there in the environment of the
tests; ``scripts/measure_install.sh --wheel`` installs that too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.integration.test_torchrun import is_the_model_of_one_process
from tests.integration.test_torchx import SMALL

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both packages, with auditwheel's tag and twine's checks."""
    folder = tmp_path_factory.mktemp("packages")
    command = ["bash", "scripts/build_packages.sh", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


class Installed:
    """A virtual environment with the wheel, and an empty folder to work in."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder / "empty"
        self.folder.mkdir()
        self.bin = folder / "venv" / "bin"
        venv.create(folder / "venv", with_pip=False)
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(self.bin / "python")]
        subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True, timeout=200)
        # Behind the wheel's files. The .pth files of that folder, such as the one of our editable installation, do
        # nothing there.
        (site / "requirements.pth").write_text(sysconfig.get_path("purelib"))

    def run(self, *command: str, more: Path | None = None) -> str:
        """The output of a console command; ``more``: a folder of further packages."""
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environ |= {"PATH": f"{self.bin}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "TORCHX_HOME": str(self.folder)}
        if more is not None:
            environ["PYTHONPATH"] = str(more)
        done = subprocess.run(
            command, cwd=self.folder, env=environ, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def installed(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    (wheel,) = packages.glob("*manylinux*.whl")
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


def test_both_packages_hold_what_a_user_needs(packages: Path) -> None:
    (wheel,), (source,) = packages.glob("*manylinux*.whl"), packages.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "megatron/elastic/py.typed",
        "megatron/elastic/launch/agent/page/",
        "megatron_elastic_torch.py",
        "share/megatron-elastic/pretrain_gpt.py",
        "share/megatron-elastic/examples/ddp.py",
        "share/megatron-elastic/scripts/pretrain_gpt_cuda.sh",
        "share/megatron-elastic/scripts/torchx_pretrain.py",
        "share/megatron-elastic/scripts/kubernetes/",
    ):
        assert any(wanted in name for name in names), wanted
    modules = [name for name in names if name.endswith(".so")]
    assert len(modules) == len(list((ROOT / "csrc").iterdir())), modules
    assert not any(name in ("megatron/__init__.py",) or "libtorch" in name for name in names)
    with tarfile.open(source) as archive:
        sources = archive.getnames()
    assert all(any(name.endswith(f"/{file}") for name in sources) for file in ("CMakeLists.txt", "SECURITY.md"))


def test_nothing_of_the_checkout_is_used(installed: Installed) -> None:
    program = "import megatron.elastic.comm as ours; print(ours.__file__)"
    assert Path(installed.run("python", "-c", program).strip()).is_relative_to(installed.bin.parent)
    files = installed.run("megatron-elastic", "files").strip()
    assert Path(files) == installed.bin.parent / "share" / "megatron-elastic"


@pytest.mark.parametrize("program", ["ddp", "fsdp2"])
def test_a_program_of_torch_alone_runs_on_the_installed_backend(installed: Installed, program: str) -> None:
    path = Path(installed.run("megatron-elastic", "files").strip()) / "examples" / f"{program}.py"
    assert "megatron" not in path.read_text(encoding="utf-8")
    launch = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    is_the_model_of_one_process(installed.run(*launch, str(path), "elastic"))


@pytest.fixture(scope="module")
def torchx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchx")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, "-r", str(ROOT / "requirements" / "torchx.txt")], check=True, timeout=300)
    return folder


def test_torchx_runs_the_installed_component_and_the_installed_script(
    installed: Installed, torchx: Path, tmp_path: Path
) -> None:
    component = f"{installed.run('megatron-elastic', 'files').strip()}/scripts/torchx_pretrain.py:pretrain"
    local = ("-s", "local_cwd", "--scheduler_args", f"log_dir={tmp_path},prepend_cwd=True", "--wait", "--log")
    command = ("python", "-m", "torchx.cli.main", "run", *local, component, "-j", "1x2", "--", *SMALL)
    installed.run(*command, more=torchx)
    logged = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("std*.log"))
    assert re.search(r"iteration +2/ +2 ", logged), logged[-4000:]
