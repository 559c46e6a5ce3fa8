"""Builds the native modules of megatron.elastic (CMake and ninja), and describes the packages to an index.

``CMakeLists.txt`` has sources, flags and libraries. This file runs it in ``build/native-*``, one folder for each
version of Python, and puts each module that is newer in its place.

Invariants: two builds of one tree take turns; a module is replaced by a rename, so a running job keeps the one that
it has mapped; nothing is replaced unless everything compiles.

    python setup.py build_ext --inplace            # also what `pip install --no-build-isolation -e .` runs
    python setup.py build_ext --target=TARGET      # a native test (tests/native/CMakeLists.txt); no module is replaced

The packages' description is README.md. An index cannot resolve links to files of the repository, so
``MEGATRON_ELASTIC_URL``, the repository's page on GitHub, makes them links into the tag of the version. Without it such
links become their texts, and the metadata names no URL.
"""

import fcntl
import filecmp
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build" / f"native-{sys.implementation.cache_tag}"


def cmake(*arguments: str | Path) -> None:
    """Run the CMake that is installed beside this interpreter, else the first one in PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    try:
        subprocess.run(["cmake", *arguments], env={**os.environ, "PATH": path}, check=True)
    except FileNotFoundError as error:
        raise CompileError("cmake is missing: pip install -r requirements/build.txt") from error
    except subprocess.CalledProcessError as error:
        raise CompileError(f"the native modules were not built: cmake ended with status {error.returncode}") from error


class BuildNative(build_ext):
    """``build_ext`` by CMake."""

    user_options: ClassVar = [*build_ext.user_options, ("target=", None, "build this target of CMakeLists.txt alone")]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.target = None

    def run(self) -> None:
        BUILD.mkdir(parents=True, exist_ok=True)
        with open(BUILD / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.configure()
            cmake("--build", BUILD, "--target", self.target or "all")
            for extension in [] if self.target else self.extensions:
                self.put_in_place(Path(self.get_ext_fullpath(extension.name)))

    def configure(self) -> None:
        """Configure; from scratch where CMake remembers another tree, interpreter or compiler."""
        made_for = "\0".join([str(ROOT), sys.executable, os.environ.get("CXX", "")])
        stamp = BUILD / "made_for"
        fresh = [] if stamp.exists() and stamp.read_text() == made_for else ["--fresh"]
        stamp.write_text(made_for)
        options = ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"]
        cmake("-S", ROOT, "-B", BUILD, "-G", "Ninja", "--log-level=WARNING", *fresh, *options)

    def put_in_place(self, target: Path) -> None:
        built = BUILD / "modules" / target.name
        if target.exists() and filecmp.cmp(built, target):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        shutil.copy2(built, partial)
        os.replace(partial, target)


def description(readme: str, repository: str, version: str) -> str:
    """Return ``readme`` with relative links made absolute; with their texts instead if ``repository`` is empty."""

    def link(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        if not repository:
            return f"({text})" if picture else text
        return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/v{version}/{path})"

    return re.sub(r"(!?)\[([^\]]+)\]\((?!https?://|#)([^)\s]+)\)", link, readme)


def pages(repository: str, version: str) -> dict[str, str]:
    """Return the metadata's URLs, none if ``repository`` is empty. Raises ``SystemExit`` if it is no URL."""
    if not repository:
        return {}
    if not repository.startswith("https://"):
        raise SystemExit(f"error: MEGATRON_ELASTIC_URL={repository}: give https://HOST/OWNER/NAME, or leave it unset")
    documents = {"Documentation": "docs/user-guide.md", "Changelog": "CHANGELOG.md"}
    files = {name: f"{repository}/blob/v{version}/{path}" for name, path in documents.items()}
    return {"Repository": repository, "Issues": f"{repository}/issues", **files}


REPOSITORY = os.environ.get("MEGATRON_ELASTIC_URL", "").rstrip("/")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

setup(
    long_description=description((ROOT / "README.md").read_text(encoding="utf-8"), REPOSITORY, VERSION),
    long_description_content_type="text/markdown",
    project_urls=pages(REPOSITORY, VERSION),
    ext_modules=[Extension(f"megatron.elastic._{folder.name}", []) for folder in sorted((ROOT / "csrc").iterdir())],
    cmdclass={"build_ext": BuildNative},
)
