"""The import contract in `pyproject.toml`: imports run downwards, and a violation is found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("file", "planted", "broken"),
    [
        (
            "vfl_flower/transport/base.py",
            "from vfl_flower.label_holder.callbacks import Callback\n",
            "vfl_flower.transport is not allowed to import vfl_flower.label_holder",
        ),
        (
            "vfl_flower/label_holder/progress.py",
            "from typing import TYPE_CHECKING\n\n"
            "if TYPE_CHECKING:\n    from strategies.vertical import Vertical\n",
            "vfl_flower.label_holder is not allowed to import strategies",
        ),
        (
            "vfl_flower/config/files.py",
            "def late() -> None:\n    from vfl_flower.data import ids\n",
            "vfl_flower.config is not allowed to import vfl_flower.data",
        ),
        (
            "vfl_flower/party/party.py",
            "from vfl_flower.label_holder.table import Table\n",
            "vfl_flower.party is not allowed to import vfl_flower.label_holder",
        ),
        (
            "vfl_flower/label_holder/table.py",
            "from vfl_flower.label_holder.label_holder import LabelHolder\n",
            "No cycles are allowed in vfl_flower.label_holder",
        ),
        (
            "vfl_flower/tools/information.py",
            "def late() -> None:\n    import vfl_attacks.canary\n",
            "vfl_flower is not allowed to import vfl_attacks",
        ),
        (
            "strategies/reference/vafl.py",
            "from vfl_flower.data import ids\n",
            "strategies.reference is not allowed to import vfl_flower",
        ),
    ],
    ids=[
        "upwards",
        "for types alone",
        "in a function",
        "sideways",
        "circle",
        "attacks",
        "reference",
    ],
)
def test_a_planted_import_breaks_the_contract(
    copy: Path, file: str, planted: str, broken: str
) -> None:
    path = copy / file
    before = path.read_text()
    path.write_text(f"{before}\n\n{planted}")
    try:
        status, said = checked(copy)
    finally:
        path.write_text(before)
    assert status == 1 and broken in said, said


def test_a_run_needs_no_extra() -> None:
    extras = ("prometheus_client", "uvicorn", "orjson", "optuna", "tensorboard", "peft")
    modules = ("server_app", "client_app", "launch.engines", "launch.serving", "tools.cli")
    text = f"import sys\nsys.modules.update(dict.fromkeys({extras}))\n"
    text += "\n".join(f"import vfl_flower.{each}" for each in modules)
    text += "\nprint('all are there')\nimport vfl_flower.label_holder.run_metrics"  # the control
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert done.stdout == "all are there\n", done.stderr
    assert "prometheus_client" in done.stderr


HEAVY = (
    *("pandas", "pyarrow", "datasets", "scipy", "sklearn", "dp_accounting", "ray", "PIL"),
    *("transformers", "optuna", "matplotlib", "sympy", "requests", "fastapi"),
)
"""Packages that a party needs for some runs alone."""


@pytest.mark.one_by_day
@pytest.mark.parametrize("more", ["", "; import pandas"], ids=["", "control"])
def test_a_partys_app_imports_no_package_that_few_runs_need(more: str) -> None:
    text = (
        "import sys, torch, flwr; before = set(sys.modules); import vfl_flower.client_app"
        f"{more}; print(*{{each.split('.')[0] for each in sys.modules.keys() - before}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    found = set(done.stdout.split())
    assert "vfl_flower" in found
    assert bool(found & set(HEAVY)) == bool(more), found & set(HEAVY)


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
