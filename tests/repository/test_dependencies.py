"""Imports are declared: the package's as dependencies, the tests' in its extra."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement

CHECKOUT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
PROJECT, BUILD = PYPROJECT["project"], PYPROJECT["build-system"]["requires"]
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
LINUX |= {"python_version": "3.11", "python_full_version": "3.11.7", "os_name": "posix"}
OURS = {"vfl_flower", "strategies", "vfl_attacks", "tests", "benchmarks", "examples"}


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
    assert missing(["vfl_flower", "strategies", "vfl_attacks"], known) == set()


@pytest.mark.nightly
def test_the_extra_for_tests_declares_what_they_import_besides() -> None:
    extras = PROJECT["optional-dependencies"]
    every = PROJECT["dependencies"] + extras["test"] + asked_for()
    # `benchmarks.peers` installs each peer into a separate environment.
    found = missing(["tests", "benchmarks", "notebooks", "deploy"], declared(every))
    assert found == {"nvflare"}


def asked_for() -> list[str]:
    """Return the modules that are imported lazily."""
    extras = PROJECT["optional-dependencies"]
    return [each for name in ("hf", "serve", "sweep", "tensorboard") for each in extras[name]]


def test_no_import_is_overlooked() -> None:
    for source in ("import {}", "from {}.io import x", "def f():\n    import a, {}.b as c"):
        assert "hidden" in imported(source.format("hidden"))


# --- the lock files of deployments and of development --------------------------------------------

LOCK = (CHECKOUT / "deploy/requirements.txt").read_text()
CONSTRAINTS = (CHECKOUT / "constraints.txt").read_text()
DEPLOYED, TESTED = "serve", "test"
FILES = pytest.mark.parametrize(
    ("text", "extra"), [(LOCK, DEPLOYED), (CONSTRAINTS, TESTED)], ids=["deploy", "constraints"]
)


def locked(text: str) -> dict[str, str]:
    """The version of each package that a lock file names."""
    return {
        normal(name): version
        for name, version in re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE)
    }


def unmet(requirements: list[str], versions: dict[str, str]) -> list[str]:
    """Requirements that a lock file does not satisfy."""
    return [
        each
        for each in requirements
        if (version := versions.get(normal(Requirement(each).name))) is None
        or version not in Requirement(each).specifier
    ]


def with_extra(extra: str) -> list[str]:
    """Return the requirements of an extra, and of the extras that it names."""
    found: list[str] = []
    for text in PROJECT["optional-dependencies"][extra]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            found += [each for name in sorted(requirement.extras) for each in with_extra(name)]
        else:
            found.append(text)
    return found


@FILES
def test_a_lock_file_satisfies_what_is_declared(text: str, extra: str) -> None:
    needed = PROJECT["dependencies"] + BUILD
    needed += [each for each in with_extra(extra) if each not in needed]
    versions = locked(text)
    assert unmet(needed, versions) == []
    for requirement in needed:  # the control
        if Requirement(requirement).specifier:
            name = Requirement(requirement).name
            assert requirement in unmet(needed, {**versions, normal(name): "0.0.1"})


def needs(name: str, version: str) -> list[str]:
    """Return a package's requirements on Linux, if this very version is installed here."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return []
    if found.version.partition("+")[0] != version:
        return []
    extra = "simulation" if name == "flwr" else ""
    return [
        text
        for text in found.requires or []
        if (marker := Requirement(text).marker) is None
        or marker.evaluate({**LINUX, "extra": extra})
    ]


@FILES
def test_a_lock_file_has_what_its_packages_need(text: str, extra: str) -> None:
    versions = locked(text)
    for name, version in versions.items():
        texts = needs(name, version)
        assert unmet(texts, versions) == [], name
        assert unmet(texts, {}) == texts  # the control


def test_tests_run_with_the_versions_that_a_deployment_installs() -> None:
    assert locked(LOCK).items() <= locked(CONSTRAINTS).items()
    target = PYPROJECT["tool"]["flwr"]["app"]["flwr-version-target"]
    assert target == locked(LOCK)["flwr"]


def test_constraints_name_versions_alone_that_any_platform_has() -> None:
    lines = [line for line in CONSTRAINTS.splitlines() if not line.startswith("#")]
    assert len(lines) == len(locked(CONSTRAINTS)) > 150
    for line in lines:  # no address, hash or build of one platform
        assert re.fullmatch(r"[a-z0-9-]+==[a-z0-9.]+", line), line


def test_make_install_bounds_every_version_also_while_it_builds(tmp_path: Path) -> None:
    python = tmp_path / "environment/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$PIP_CONSTRAINT $PIP_BUILD_CONSTRAINT $*" >> said\n')
    python.chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    make = ["make", "-f", str(CHECKOUT / "Makefile"), "PYTHON=true", "VENV=environment", "install"]
    subprocess.run(make, cwd=tmp_path, check=True, capture_output=True)
    calls = [line for line in (tmp_path / "said").read_text().splitlines() if "pip install" in line]
    assert calls and all(line.startswith("constraints.txt constraints.txt ") for line in calls)
    before = (tmp_path / "said").read_text()
    subprocess.run(make, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "said").read_text() == before
    os.utime(tmp_path / "constraints.txt", (2**31, 2**31))  # renewed
    subprocess.run(make, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "said").read_text() == 2 * before


def test_the_lock_file_names_hashes_and_no_address() -> None:
    entries = re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", LOCK, flags=re.MULTILINE).strip())
    assert len(entries) == len(locked(LOCK)) > 50
    for entry in entries:
        assert re.fullmatch(r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+", entry), entry
    assert "torch==" in LOCK and "+cpu" not in LOCK


# --- packages and workflows ----------------------------------------------------------------------


def test_the_packages_say_that_they_have_types() -> None:
    for package in ("vfl_flower", "strategies", "vfl_attacks"):
        assert (CHECKOUT / package / "py.typed").is_file()


def test_actions_are_pinned_by_commit() -> None:
    """A tag can be moved to other code."""
    workflows = list((CHECKOUT / ".github" / "workflows").glob("*.yml"))
    used = [each for path in workflows for each in re.findall(r"uses: (\S+)", path.read_text())]
    assert len(workflows) > 3 and len(used) > 10
    assert [each for each in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", each)] == []
