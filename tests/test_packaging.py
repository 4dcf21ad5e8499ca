# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
PACKAGE = REPO / "cosmos_framework"
HEADER = (
    "# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors\n# SPDX-License-Identifier: Apache-2.0\n"
)
# The house's floors from the top down: a room may import from those below it, and from its own floor.
FLOORS = [{"scripts"}, {"trainer"}, {"callbacks", "checkpoint"}, {"model", "data", "sim"}, {"utils"}]


def imported_modules(file: Path) -> set[str]:
    """Names the modules that a file imports when it runs, wherever in the file; not those for type checking alone."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(file.relative_to(REPO).parts[: -node.level]) if node.level else ""
            modules.add(".".join(filter(None, [package, node.module])))
    return modules


@pytest.mark.parametrize("floor", range(len(FLOORS)))
def test_arrows_point_down(floor: int) -> None:
    above = set().union(*FLOORS[:floor])
    for room in FLOORS[floor]:
        for file in (PACKAGE / room).rglob("*.py"):
            for module in imported_modules(file):
                is_above = module.startswith("cosmos_framework.") and module.split(".")[1] in above
                assert not is_above, f"{file.relative_to(REPO)} imports {module}"


def test_the_core_needs_torch_and_the_standard_library_alone() -> None:
    for file in (PACKAGE / "utils" / "grad_sync").glob("*.py"):
        for module in imported_modules(file):
            is_own = module.startswith("cosmos_framework.utils.grad_sync")
            assert is_own or module.split(".")[0] in {"torch", *sys.stdlib_module_names}, f"{file.name}: {module}"


@pytest.mark.slow
def test_the_core_imports_where_nothing_else_of_the_package_is(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE / "utils" / "grad_sync", tmp_path / "grad_sync")
    program = "import sys, grad_sync; grad_sync.GradSync; print('cosmos_framework' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("folder", ["cosmos_framework", "scripts", "tests", "configs"])
def test_every_file_says_whose_it_is(folder: str) -> None:
    for file in (REPO / folder).rglob("*"):
        if file.suffix in {".py", ".sh", ".yaml"} and file.stat().st_size:
            assert HEADER in file.read_text()[:300], file


def test_pins_are_exact_and_complete() -> None:
    lines = (REPO / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert all(re.fullmatch(r"[\w.]+", version) for version in pins.values())
    pinned = {name.lower().replace("_", "-") for name in pins}
    asked_for = re.findall(
        r'"([a-z-]+)(?:>=[\d.]+)?"', (REPO / "setup.py").read_text().partition("install_requires")[2]
    )
    extras = {"sim", "data", "report", "dev", "upstream"}
    assert {"torch", "hydra-core", "pyarrow", "metaworld"} <= set(asked_for)
    assert set(asked_for) - extras - {"console-scripts"} <= pinned


@pytest.mark.slow
def test_the_wheel_carries_the_configuration_and_the_command(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tracked = ["setup.py", "pyproject.toml", "README.md", "LICENSE"]
    source.mkdir()
    for name in tracked:
        shutil.copy(REPO / name, source)
    for name in ("cosmos_framework", "configs"):
        shutil.copytree(REPO / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    wheels = tmp_path / "wheels"
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(source)]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = wheels.glob("cosmos_framework-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "cosmos-train = cosmos_framework.scripts.train:main" in archive.read(entry_points).decode()
    in_checkout = {str(file.relative_to(REPO)) for file in (REPO / "configs").rglob("*.yaml")}
    assert in_checkout and {f"cosmos_framework/{name}" for name in in_checkout} <= names
    assert {str(file.relative_to(REPO)) for file in PACKAGE.rglob("*.py")} <= names
    assert not any(name.startswith(("tests/", "scripts/")) for name in names)
