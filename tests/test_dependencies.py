"""What is imported is declared: by the package what it needs, by its extra what tests need too."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement

CHECKOUT = Path(__file__).parent.parent
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
OURS = {"vfl_flower", "strategies", "tests", "benchmarks"}


def declared(requirements: list[str]) -> set[str]:
    return {normal(Requirement(each).name) for each in requirements}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(source: str) -> Iterator[str]:
    """The packages that are imported, at the top or in a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def sources(folder: str) -> Iterator[str]:
    for path in (CHECKOUT / folder).rglob("*.py"):
        yield path.read_text()
    for path in (CHECKOUT / folder).rglob("*.ipynb"):
        cells = nbformat.read(path, as_version=4)["cells"]
        yield from (cell["source"] for cell in cells if cell["cell_type"] == "code")


def missing(folders: list[str], known: set[str]) -> set[str]:
    """Packages that are imported, and of no distribution that is declared."""
    names = {name for folder in folders for source in sources(folder) for name in imported(source)}
    assert len(names) > 5
    providers = packages_distributions()
    return {
        name
        for name in names - OURS - sys.stdlib_module_names
        if not {normal(each) for each in providers.get(name, [])} & known
    }


def test_the_package_declares_what_it_imports() -> None:
    known = declared(PROJECT["dependencies"] + asked_for())
    assert missing(["vfl_flower", "strategies"], known) == set()


def test_the_extra_for_tests_declares_what_they_import_besides() -> None:
    extras = PROJECT["optional-dependencies"]
    every = PROJECT["dependencies"] + extras["test"] + asked_for()
    assert missing(["tests", "benchmarks", "notebooks", "deploy"], declared(every)) == set()


def asked_for() -> list[str]:
    """What is imported where it is asked for."""
    extras = PROJECT["optional-dependencies"]
    return [each for name in ("hf", "sweep", "tensorboard") for each in extras[name]]


@pytest.mark.parametrize(
    "source", ["import {}", "from {}.io import x", "def f():\n    import a, {}.b as c"]
)
def test_no_import_is_overlooked(source: str) -> None:
    assert "hidden" in imported(source.format("hidden"))
