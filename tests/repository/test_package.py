"""The wheel works in a clean environment, and the bundle works on a plain SuperLink."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import distribution
from pathlib import Path

import pytest
import tomli_w

from tests.fleet import processes_of, until
from tests.repository.test_installed import CHECKOUT, SOURCES, copy_sources
from vfl_flower.launch.processes import reserved_port, stop

PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
PAGE = {"vfl_flower/results/layout.toml"}

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def environment_of(home: Path) -> dict[str, str]:
    """Environment variables of a user without a checkout, whose Flower is in this folder."""
    without = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    off = {"FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    off |= {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}
    return {**without, **off, "FLWR_HOME": str(home), "VFL_HOME": str(home / "vfl-flower")}


def ended(command: list[str], folder: Path, home: Path, code: int = 0) -> str:
    """Output of a command that ends with this exit code."""
    environment = environment_of(home)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == code, said[-3000:]
    return said


def from_index(command: list[str], folder: Path) -> None:
    """Run a command that needs an index of packages, or skip the test where there is none."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    said = done.stdout + done.stderr
    for line in said.splitlines():
        if "No matching distribution found" in line:
            pytest.skip(f"pip reaches no index: {line}")
    assert done.returncode == 0, said[-3000:]


# --- the wheel ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and with the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--outdir", str(folder), str(CHECKOUT)]
    from_index(build, folder)
    return folder


@pytest.fixture(scope="module")
def clean(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a new environment, into which pip installs torch and the wheel."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install"]
    (torch,) = (each for each in PROJECT["dependencies"] if each.startswith("torch"))
    (wheel,) = dist.glob("*.whl")
    from_index([*pip, "--quiet", "--no-compile", torch], home)
    from_index([*pip, "--quiet", "--no-compile", str(wheel)], home)
    return home / "bin"


def test_the_wheel_has_the_package_alone_and_the_sdist_all_that_tests_need(dist: Path) -> None:
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    check = [str(Path(sys.executable).with_name("twine")), "check", "--strict"]
    ended([*check, str(wheel), str(sdist)], CHECKOUT, dist)
    contents = str(Path(sys.executable).with_name("check-wheel-contents"))
    ended([contents, str(wheel)], CHECKOUT, dist)
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"vfl_flower-{PROJECT['version']}.dist-info"
    packages = {name.split("/")[0] for name in names}
    assert packages == {"strategies", "vfl_attacks", "vfl_flower", info}
    typed = {f"{package}/py.typed" for package in packages - {info}}
    assert {*PAGE, *typed, f"{info}/licenses/LICENSE"} <= names
    with tarfile.open(sdist) as archive:
        folders = {"/".join(Path(each.name).parts[1:2]) for each in archive.getmembers()}
    assert {"tests", "benchmarks", "docs", "notebooks", "examples", "deploy"} <= folders
    assert {*SOURCES, "Makefile", "CONTRIBUTING.md"} <= folders


def test_a_clean_environment_trains_on_each_engine(clean: Path, tmp_path: Path) -> None:
    folder, home = tmp_path / "empty", tmp_path / "home"
    folder.mkdir()
    ask = "import strategies, vfl_flower as v; print(v.__file__, strategies.__file__, v.train)"
    where = ended([str(clean / "python"), "-c", ask], folder, home)
    assert where.count(str(clean.parent)) == 2  # the control: no checkout is imported
    assert str(CHECKOUT) not in where
    vfl = str(clean / "vfl")
    assert "demo" in ended([vfl, "--help"], folder, home)
    said = ended([vfl, "demo"], folder, home)
    assert "test accuracy 0.9" in said
    page = Path(said.rpartition("report: ")[2].split("\n")[0])
    assert page.is_relative_to(folder / "runs")
    assert "<svg" in page.read_text()
    keys = ["-c", "dataset='breast-cancer' epochs=2", "--parties", "2"]
    for engine in ("local", "ray", "supernodes"):
        ended([vfl, "run", *keys, "--engine", engine, "--out", f"runs/{engine}"], folder, home)
        assert (folder / "runs" / engine / "summary.json").exists()
    ended([vfl, "predict", "runs/ray"], folder, home)
    assert processes_of(home) == []


def test_without_an_extra_the_error_names_the_command_that_installs_it(
    clean: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "distilbert"}')
    keys = "dataset='breast-cancer' epochs=1"
    asked = {
        "sweep": ["sweep", "vafl", "--search", "party-lr=1e-3..1:log", "--trials", "1", "-c", keys],
        "tensorboard": ["run", "-c", f"{keys} observer='tensorboard'"],
        "serve": ["run", "-c", f"{keys} observer='prometheus'"],
        "hf": ["run", "-c", f"{keys} bottom-model='hf:{tmp_path}/model'"],
    }
    for extra, words in asked.items():
        said = ended([str(clean / "vfl"), *words], tmp_path, tmp_path / "home", code=1)
        assert f"Run: pip install 'vfl-flower[{extra}]'" in said.splitlines()[-1], said


# --- the bundle -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with Flower and all dependencies, but without this package.

    Path files of the dependencies' folder are not read there, so that this checkout cannot be
    imported.
    """
    home = tmp_path_factory.mktemp("flower")
    venv.create(home)
    packages = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for script in distribution("flwr").entry_points.select(group="console_scripts"):
        command = home / "bin" / script.name
        start = f"import sys\nfrom {script.module} import {script.attr} as start\n"
        command.write_text(f"#!{home}/bin/python\n{start}sys.exit(start())\n")
        command.chmod(0o755)
    said = ended([str(home / "bin" / "python"), "-c", "import vfl_flower"], home, home, code=1)
    assert "No module named 'vfl_flower'" in said  # the control
    return home / "bin"


def is_there(port: int) -> bool:
    """Whether a server answers at this port."""
    with suppress(OSError):
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).status == 200
    return False


@pytest.fixture
def superlink(flower: Path, tmp_path: Path) -> Iterator[Path]:
    """FLWR_HOME of a SuperLink for simulations, as Flower starts it."""
    home = tmp_path / "home"
    home.mkdir()
    with reserved_port() as port, (home / "superlink.log").open("w") as log:
        where = {"address": f"127.0.0.1:{port}", "insecure": True}
        links = {"superlink": {"default": "plain", "plain": where}}
        (home / "config.toml").write_text(tomli_w.dumps(links))
        command = [str(flower / "flower-superlink"), "--insecure", "--simulation"]
        environment = environment_of(home)
        environment["PATH"] = f"{flower}{os.pathsep}{environment['PATH']}"
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=home,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            until(lambda: process.poll() is not None or is_there(port), 60)
            assert process.poll() is None
            yield home
        finally:
            stop(process)
    until(lambda: not processes_of(home), 60)  # of Ray, which end once their raylet has


def test_the_bundle_runs_in_a_simulation_without_the_package(
    flower: Path, superlink: Path, tmp_path: Path
) -> None:
    app, unpacked = tmp_path / "app", tmp_path / "bundle"
    copy_sources(app)
    said = ended([str(flower / "flwr"), "build", "--app", str(app)], tmp_path, superlink)
    (bundle,) = tmp_path.glob("*.fab")
    assert said.split() == ["🎊", "Successfully", "built", bundle.name]
    with zipfile.ZipFile(bundle) as archive:
        archive.extractall(unpacked)
    shutil.rmtree(app)
    found = {path.name for path in unpacked.iterdir()}
    assert found == {*SOURCES, ".info"} - {"vfl_attacks"}  # which no node needs
    about = tomllib.loads((unpacked / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert about["fab-format-version"] == 1

    out = tmp_path / "out"
    keys = f"dataset='breast-cancer' epochs=2 out='{out}'"
    nodes = "num-supernodes=2 client-resources-num-cpus=1 init-args-num-cpus=2"
    command = [str(flower / "flwr"), "run", str(unpacked), "plain", "--stream"]
    said = "timed out during startup"
    for _ in range(2):  # on a busy machine Ray may start too slowly
        if "timed out during startup" in said:
            shutil.rmtree(out, ignore_errors=True)
            said = ended([*command, "-c", keys, "--federation-config", nodes], tmp_path, superlink)
    assert (out / "summary.json").exists(), said
    assert json.loads((out / "summary.json").read_text())["test_accuracy"] > 0.6
