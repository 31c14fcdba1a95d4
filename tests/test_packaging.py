"""What is declared installs together: imports, ranges, pins, packaged files."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINS = {canonicalize_name(name): Version(pin) for name, _, pin in (line.partition("==") for line in LINES) if pin}


@pytest.mark.parametrize("text", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]])
def test_every_requirement_is_pinned_inside_its_range(text: str) -> None:
    requirement = Requirement(text)
    assert PINS[canonicalize_name(requirement.name)] in requirement.specifier


def test_pins_name_no_build_of_torch_and_nothing_twice() -> None:
    assert PINS["torch"].local is None
    assert len(PINS) == sum("==" in line for line in LINES)


def test_every_pin_installs_on_the_first_patch_of_the_promised_python() -> None:
    """As far as the pins are what is installed here."""
    [bound] = [each for each in SpecifierSet(PROJECT["requires-python"]) if each.operator == ">="]
    installed = {canonicalize_name(one.name): one for one in metadata.distributions() if one.name}
    asked = {
        name: installed[name].metadata["Requires-Python"] or ""
        for name, pin in PINS.items()
        if name in installed and Version(installed[name].version).public == pin.public
    }
    assert len(asked) > len(PINS) / 3
    assert [name for name, wanted in asked.items() if f"{bound.version}.0" not in SpecifierSet(wanted)] == []


def test_every_imported_package_is_declared() -> None:
    """A package that only came along with another may leave with it."""
    declared = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    optional = {"vllm", "unsloth", "tensorboard", "trackio", "bitsandbytes", "gguf", "mcp", "starlette", "uvicorn"}
    optional |= {"inspect-ai", "olefile", "pypdf"}
    named_otherwise = {"dotenv": "python-dotenv", "bs4": "beautifulsoup4", "Stemmer": "pystemmer"}
    foreign = {
        canonicalize_name(named_otherwise.get(name, name)): path
        for path in (ROOT / "emailrl").rglob("*.py")
        for name in imported(ast.parse(path.read_text(encoding="utf-8")))
        # _typeshed holds names for type checkers; it is part of them.
        if name not in sys.stdlib_module_names and name not in ("emailrl", "_typeshed")
    }
    assert {name: str(path) for name, path in foreign.items() if name not in declared | optional} == {}


def imported(tree: ast.Module) -> Iterator[str]:
    """The top-level name of every absolute import, at any depth of the code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.split(".")[0]


def test_what_travels_with_the_package() -> None:
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").lstrip().startswith("Apache License")
    assert "## 0.1.0" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert (ROOT / "emailrl/py.typed").is_file()


def test_a_script_beside_a_clone_imports_the_package_and_not_the_clone(tmp_path: Path) -> None:
    """A folder named as the package counts as a namespace package, which only what stands on sys.path beats."""
    clone = tmp_path / "emailrl"
    shutil.copytree(ROOT / "emailrl", clone / "emailrl", ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    build = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=clone, check=True, capture_output=True)
    venv.create(tmp_path / "venv")
    [wheel], [site] = tmp_path.glob("*.whl"), tmp_path.glob("venv/lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    (tmp_path / "script.py").write_text("import emailrl; print(emailrl.__file__)")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in (["script.py"], ["-c", "import emailrl; print(emailrl.__file__)"]):
        ended = subprocess.run(
            [tmp_path / "venv/bin/python", *command], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert ended.stdout.strip() == str(clone / "emailrl/__init__.py"), ended.stderr


def test_a_wheel_built_from_the_sdist_holds_every_file_of_the_package_and_runs(tmp_path: Path) -> None:
    """As a release builds them: what is missing in the sdist or the declared data is missing here."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a clone: git lists what belongs to the package")
    source, ours = tmp_path / "source", [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    for name in ours:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)

    def build(kind: str, folder: Path) -> None:
        program = f"import sys; from setuptools.build_meta import build_{kind}; build_{kind}(sys.argv[1])"
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=folder, check=True, capture_output=True)

    build("sdist", source)
    [archive] = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    build("wheel", unpacked)
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site := tmp_path / "site")
    held = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert {name for name in held if not name.partition("/")[0].endswith(".dist-info")} == {
        name for name in ours if name.startswith("emailrl/")
    }
    environment = os.environ | {"PYTHONPATH": str(site)}
    program = "import emailrl, sys; from emailrl.__main__ import main; print(emailrl.__file__); main()"
    command = [sys.executable, "-P", "-c", program, "gen-db", "--source", "demo", "--db", "demo.db"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.stdout.startswith(str(site)) and ended.returncode == 0, ended.stderr
    assert (tmp_path / "demo.db").is_file()


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

PYTHON = """\
#!/bin/sh
# Stands for Python: makes an environment whose pip, told by a file beside the Makefile, succeeds or fails.
case "$2" in
venv) for last; do :; done; mkdir -p $last/bin; cp "$0" $last/bin/python ;;
pip) echo "Collecting $last"; [ ! -e broken ] || { echo "ERROR: soupsieve needs a newer Python" >&2; exit 7; } ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the Makefile, what it depends on, and the stand-in for Python."""
    for name in ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "VENV"):  # of the make that runs these tests
        monkeypatch.delenv(name, raising=False)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make_install(clone: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "install", "PYTHON=./python"], cwd=clone, capture_output=True, text=True)


@needs_make
@pytest.mark.parametrize("made", [False, True])
def test_a_failed_install_gives_pips_reason_and_clears_nothing_but_what_it_began(clone: Path, made: bool) -> None:
    if made:  # by other means
        subprocess.run(["./python", "-m", "venv", ".venv"], cwd=clone, check=True)
        (clone / ".venv/mine").touch()
    (clone / "broken").touch()
    failed = make_install(clone)
    assert failed.returncode and "ERROR: soupsieve needs a newer Python" in failed.stderr
    if not made:
        (clone / ".venv/bin/python").write_text("#!/bin/sh\nexit 9")  # what is left is the interpreter that did not do
    (clone / "broken").unlink()
    done = make_install(clone)
    assert done.returncode == 0 and "Collecting" not in done.stdout + done.stderr
    assert (clone / ".venv/mine").exists() == made
    (clone / ".venv/mine").touch()
    (clone / "broken").touch()
    os.utime(clone / ".venv/.installed", (0, 0))  # pyproject.toml has changed since
    assert make_install(clone).returncode
    assert make_install(clone).returncode
    assert (clone / ".venv/mine").exists()  # an environment that was whole is brought up to date, not made anew


@needs_make
def test_help_lists_every_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    [targets] = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY: ")]
    for target in targets.split()[2:]:
        assert f"make {target} " in shown
