"""Builds the native parts of megatron.elastic against the torch that is installed.

Idea: one small incremental compiler driver instead of one per extension. A
module is a folder of ``csrc``; files below a ``torch`` folder include torch's
headers (C++20, slow), all others do not (C++17, fast). An object file is named
by a hash of its whole command line and is rebuilt when a header it read is
newer, so switching interpreters or flags never reuses a wrong object.

Invariants: no ``-march`` (a wheel runs on any CPU of the architecture), no
contraction of a*b+c (owner and mirror must round alike), a module that fails
does not keep the others from being built, and the table printed at the end
names every module with what became of it.

    python setup.py build_ext --inplace      # what `pip install --no-build-isolation -e .` runs
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
SKIPPED_FOLDERS = frozenset({"test", "tests", "fuzz", "bench"})
COMMON_FLAGS = (
    *("-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),  # the last two: GCC vectorises sqrt
)
SYSTEM_LIBRARIES = ("-pthread", "-ldl", "-lrt")


@dataclass(frozen=True)
class Module:
    """One extension: the folder under ``csrc`` and whether it links against torch."""

    name: str
    folder: str
    torch: bool

    def sources(self) -> list[Path]:
        """All ``*.cpp`` of the folder, tests and fuzzers apart, in a fixed order."""
        found = (ROOT / "csrc" / self.folder).rglob("*.cpp")
        return sorted(path for path in found if not SKIPPED_FOLDERS & set(path.relative_to(ROOT).parts))


MODULES = (
    Module("megatron.elastic._comm", "comm", torch=True),
    Module("megatron.elastic._state", "state", torch=False),
    Module("megatron.elastic._random", "random", torch=False),
    Module("megatron.elastic._plan", "plan", torch=False),
    Module("megatron.elastic._frequency", "frequency", torch=False),
    Module("megatron.elastic._process", "process", torch=False),
)


def compiler() -> list[str]:
    """The C++ compiler: ``$CXX``, else g++ or clang++."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise CompileError("no C++ compiler: install g++ (Debian: apt install g++) or set CXX")


def torch_flags() -> tuple[list[str], list[str]]:
    """(compile flags, link flags) of the installed torch."""
    try:
        import torch
        from torch.utils.cpp_extension import include_paths, library_paths
    except ImportError as error:
        raise CompileError(
            "torch must be installed before this package is built: pip install torch==2.13.0, "
            "then pip install --no-build-isolation -e ."
        ) from error
    compile_flags = [f"-isystem{path}" for path in include_paths()]
    compile_flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
    link_flags = [f"-L{path}" for path in library_paths()]
    link_flags += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    return compile_flags, link_flags


def module_flags(module: Module) -> tuple[list[str], list[str], list[str]]:
    """(flags of every source, flags added for those below ``torch/``, link flags)."""
    name = module.name.rpartition(".")[2]
    shared = [*COMMON_FLAGS, f"-DTORCH_EXTENSION_NAME={name}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    shared += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / module.folder}", f"-isystem{sysconfig.get_path('include')}"]
    if module.torch:
        with_torch, link = torch_flags()
        return shared, ["-std=c++20", *with_torch], link
    import pybind11

    return [*shared, f"-isystem{pybind11.get_include()}"], [], []


def is_current(target: Path, dependency_file: Path) -> bool:
    """Whether ``target`` is newer than everything its compiler's dependency file lists."""
    if not target.exists() or not dependency_file.exists():
        return False
    listed = dependency_file.read_text().replace("\\\n", " ").partition(":")[2].split()
    built = target.stat().st_mtime_ns
    return all(os.path.exists(path) and os.stat(path).st_mtime_ns <= built for path in listed)


def run(command: list[str]) -> None:
    """Run a compiler; its own words are the error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.stderr:
        sys.stderr.write(done.stderr)
    if done.returncode:
        raise CompileError(f"exit status {done.returncode}: {shlex.join(command)}")


def compile_object(source: Path, flags: list[str], folder: Path) -> tuple[Path, bool]:
    """Compile ``source`` if it needs to be; (object file, whether it was compiled)."""
    command = [*compiler(), *flags, "-c", str(source)]
    digest = hashlib.sha256("\0".join(command).encode()).hexdigest()[:12]
    target = folder / f"{source.stem}-{digest}.o"
    dependency_file = target.with_suffix(".d")
    if is_current(target, dependency_file):
        return target, False
    partial = target.with_suffix(".tmp")
    run([*command, "-MMD", "-MF", str(dependency_file), "-MT", str(target), "-o", str(partial)])
    os.replace(partial, target)
    return target, True


def build_module(module: Module, output: Path, folder: Path, jobs: int) -> str:
    """Bring one extension up to date; what was done, in words."""
    sources = module.sources()
    folder.mkdir(parents=True, exist_ok=True)
    shared, with_torch, link = module_flags(module)

    def flags_of(source: Path) -> list[str]:
        return [*shared, *with_torch] if "torch" in source.parent.parts else [*shared, "-std=c++17"]

    with ThreadPoolExecutor(jobs) as pool:
        built = list(pool.map(lambda path: compile_object(path, flags_of(path), folder), sources))
    objects = [str(target) for target, _ in built]
    compiled = sum(was_compiled for _, was_compiled in built)
    command = [*compiler(), "-shared", *objects, *link, *SYSTEM_LIBRARIES]
    stamp = folder / "link.sha256"
    digest = hashlib.sha256("\0".join([*command, str(output)]).encode()).hexdigest()
    if compiled == 0 and output.exists() and stamp.exists() and stamp.read_text() == digest:
        return f"up to date ({len(sources)} files)"
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".partial")
    run([*command, "-o", str(partial)])
    os.replace(partial, output)  # a running job keeps the inode it has mapped
    stamp.write_text(digest)
    return f"built ({compiled} of {len(sources)} files compiled)"


class BuildNative(build_ext):
    """``build_ext`` with our own driver: per-file flags, incremental, one table at the end."""

    def build_extensions(self) -> None:
        base = ROOT / "build" / "native"
        base.mkdir(parents=True, exist_ok=True)
        jobs = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
        rows: list[tuple[str, str]] = []
        errors: list[str] = []
        with open(base / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two builds of one tree take turns
            for module in MODULES:
                if not module.sources():
                    rows.append((module.name, f"skipped: no sources in csrc/{module.folder}"))
                    continue
                output = Path(self.get_ext_fullpath(module.name)).resolve()
                try:
                    rows.append((module.name, build_module(module, output, base / module.folder, jobs)))
                except CompileError as error:
                    rows.append((module.name, "FAILED (see above)"))
                    errors.append(f"{module.name}: {error}")
        width = max(len(name) for name, _ in rows)
        print("\n".join(f"{name:<{width}}  {state}" for name, state in rows), flush=True)
        if errors:
            raise CompileError("\n".join(errors))


setup(
    ext_modules=[
        Extension(module.name, [str(path.relative_to(ROOT)) for path in module.sources()])
        for module in MODULES
        if module.sources()
    ],
    cmdclass={"build_ext": BuildNative},
)
