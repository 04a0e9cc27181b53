"""The import contract in `pyproject.toml`: imports run downwards, and a violation is found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
PACKAGES = "vfl_flower", "strategies", "vfl_attacks"
CONTRACTS = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["importlinter"]


def checked(folder: Path) -> tuple[int, str]:
    """Exit status and output of the check on the packages in a folder."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=without, capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    for package in PACKAGES:
        shutil.copytree(
            CHECKOUT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(CHECKOUT / "pyproject.toml", folder)
    return folder


@pytest.mark.nightly  # by day `make lint` checks it
def test_imports_keep_the_contract(copy: Path) -> None:
    status, said = checked(copy)
    assert status == 0, said


_TYPES = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    "
_LATE = "def late() -> None:\n    "
FORBIDDEN = "{} is not allowed to import {}"
PLANTED = {  # file, import, and what is broken
    "upwards": (
        *("vfl_flower/transport/base", "from vfl_flower.label_holder.callbacks import Callback"),
        FORBIDDEN.format("vfl_flower.transport", "vfl_flower.label_holder"),
    ),
    "for types alone": (
        *("vfl_flower/label_holder/progress", f"{_TYPES}from strategies.vertical import Vertical"),
        FORBIDDEN.format("vfl_flower.label_holder", "strategies"),
    ),
    "in a function": (
        *("vfl_flower/config/files", f"{_LATE}from vfl_flower.data import ids"),
        FORBIDDEN.format("vfl_flower.config", "vfl_flower.data"),
    ),
    "sideways": (
        *("vfl_flower/party/party", "from vfl_flower.label_holder.table import Table"),
        FORBIDDEN.format("vfl_flower.party", "vfl_flower.label_holder"),
    ),
    "circle": (
        *("vfl_flower/label_holder/table", "import vfl_flower.label_holder.label_holder"),
        "No cycles are allowed in vfl_flower.label_holder",
    ),
    "attacks": (
        *("vfl_flower/tools/operate", f"{_LATE}import vfl_attacks.canary"),
        FORBIDDEN.format("vfl_flower", "vfl_attacks"),
    ),
    "reference": (
        *("strategies/reference/vafl", "from vfl_flower.data import ids"),
        FORBIDDEN.format("strategies.reference", "vfl_flower"),
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_import_breaks_the_contract(copy: Path, name: str) -> None:
    file, planted, broken = PLANTED[name]
    path = copy / f"{file}.py"
    before = path.read_text()
    path.write_text(f"{before}\n\n{planted}\n")
    try:
        status, said = checked(copy)
    finally:
        path.write_text(before)
    assert status == 1 and broken in said, said


HEAVY = (
    *("pandas", "pyarrow", "datasets", "scipy", "sklearn", "dp_accounting", "ray", "PIL"),
    *("transformers", "optuna", "matplotlib", "sympy", "requests", "fastapi", "jinja2"),
)
"""Packages that a party needs for some runs alone."""


def test_a_run_needs_no_extra_and_a_partys_app_no_package_that_few_runs_need() -> None:
    extras = ("prometheus_client", "uvicorn", "orjson", "tensorboard", "peft")
    modules = ("server_app", "launch.engines", "launch.serving", "tools.cli")
    text = f"""
import sys, torch, flwr
sys.modules.update(dict.fromkeys({extras}))
def imports(name):
    before = set(sys.modules)
    __import__(name)
    print(*{{each.split(".")[0] for each in sys.modules.keys() - before}})
imports("vfl_flower.client_app")
imports("pandas")  # the control
for each in {modules}:
    imports("vfl_flower." + each)
import vfl_flower.label_holder.run_metrics  # the control
"""
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=CHECKOUT, capture_output=True, text=True
    )
    app, control, *others = [set(line.split()) for line in done.stdout.splitlines()]
    assert "vfl_flower" in app and not app & set(HEAVY)
    assert "pandas" in control
    assert len(others) == len(modules), done.stderr
    assert not others[0] & {"scipy", "sklearn", "jinja2"}  # nor what few label holders need
    assert not set().union(*others) & {"optuna"} and "prometheus_client" in done.stderr


def test_every_part_of_the_package_has_a_floor() -> None:
    """Else a new folder could import what it likes."""
    floors = {each for line in CONTRACTS["contracts"][0]["layers"] for each in line.split(" | ")}
    found = {
        path
        for path in (CHECKOUT / "vfl_flower").iterdir()
        if path.name[:1] not in "_." and path.suffix in ("", ".py")
    }
    parts = {f"vfl_flower.{path.stem}" for path in found}
    assert parts ^ floors == {"strategies", "vfl_attacks"}
