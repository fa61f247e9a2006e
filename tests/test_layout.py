"""Is the tree laid out so that our packages win, and so that it works on any machine?

The package names are short words; a folder without `__init__.py`, or a script called like a package, lets a
stray `data` or `tests` win an import without a word. These tests find that before a run does.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("envs", "data", "rollouts", "train", "scripts")
MAX_LINES = 400
LONGER: frozenset[str] = frozenset()
"""Files that may be longer, as paths from the root, because the algorithm is clearer whole."""

# Written in two parts, so that this file does not match itself.
REGISTRY_WORDS = tuple(
    a + b
    for a, b in (
        ("index", "-url"),
        ("pypi", ".org"),
        ("python", "hosted.org"),
        ("npmjs", ".org"),
        ("deb.debian", ".org"),
        ("archive.ubuntu", ".com"),
    )
)
TORCH_HOST = "download.pytorch" + ".org"
TORCH_CPU_INDEX = f"https://{TORCH_HOST}/whl/cpu"
NOT_SOURCE = frozenset({"runs", "build", "dist", "wandb", "__pycache__", "node_modules"})


def source_folders(*tops: str) -> Iterator[Path]:
    """Every folder at or below `tops` that holds Python files."""
    for top in tops:
        yield from sorted({path.parent for path in (ROOT / top).rglob("*.py")})


def source_files() -> Iterator[Path]:
    """Every file of the tree that a person wrote: no hidden folder but `.ci`, no output."""
    for folder, names, files in os.walk(ROOT):
        names[:] = [
            name
            for name in names
            if name not in NOT_SOURCE and not name.endswith(".egg-info") and (name == ".ci" or not name.startswith("."))
        ]
        yield from (Path(folder, name) for name in files)


def text_of(path: Path) -> str | None:
    """The text of a file, or None for a binary one, such as model weights."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_folder_has_an_init_that_holds_only_a_docstring() -> None:
    for folder in source_folders(*PACKAGES, "tests"):
        init = folder / "__init__.py"
        assert init.is_file(), f"{relative(folder)} has no __init__.py"
        tree = ast.parse(init.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), f"{relative(init)} has no docstring"
        assert len(tree.body) == 1, f"{relative(init)} holds more than its docstring"


def test_our_packages_win_from_an_empty_folder(tmp_path: Path) -> None:
    code = "import data, envs, rollouts, train\nfor m in (data, envs, rollouts, train): print(m.__file__)"
    # -P and no PYTHONPATH: only what is installed counts, as in a launched training process.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = [Path(line).resolve() for line in done.stdout.splitlines()]
    assert found == [ROOT / name / "__init__.py" for name in ("data", "envs", "rollouts", "train")]


def test_no_module_is_named_like_a_package() -> None:
    taken = {*PACKAGES, "tests", "configs"}
    for folder in source_folders(*PACKAGES):
        if folder.parent != ROOT:
            assert folder.name not in taken, f"{relative(folder)} is named like a top-level package"
        for path in folder.glob("*.py"):
            assert path.stem not in taken, f"{relative(path)} is named like a top-level package"
    assert not [path.name for path in ROOT.glob("*.py")], "modules at the root are importable by any name"


def test_pyproject_lists_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    assert listed == {relative(folder).replace("/", ".") for folder in source_folders(*PACKAGES)}


def test_files_stay_short() -> None:
    for folder in source_folders(*PACKAGES):
        for path in folder.glob("*.py"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            allowed = lines <= MAX_LINES or relative(path) in LONGER
            assert allowed, f"{relative(path)} has {lines} lines: more than {MAX_LINES}, one question a file"


def test_no_registry_is_named() -> None:
    for path in source_files():
        text = text_of(path)
        if text is None:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            named = [word for word in REGISTRY_WORDS if word in line.lower()]
            # pip's own option is needed to pass PyTorch's index on.
            if relative(path) == "scripts/setup.sh" and "$torch_index" in line:
                continue
            assert not named, f"{relative(path)}:{number} names {named}; use the settings of the machine"
            if TORCH_HOST in line:
                assert TORCH_CPU_INDEX in line, f"{relative(path)}:{number}: only {TORCH_CPU_INDEX} is named"


def test_no_path_of_this_machine() -> None:
    # A short one, such as root's home, cannot be told from a path inside a sandbox.
    folders = [f"{folder}/" for folder in (ROOT, Path.home()) if len(folder.parts) >= 3]
    for path in source_files():
        text = text_of(path) or ""
        found = [folder for folder in folders if folder in text]
        assert not found, f"{relative(path)} holds a path of this machine: {found}"
