"""The wheel, installed where there is nothing else of ours, runs from another folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import pytest
from flwr.cli.build import build_fab_from_disk

from vfl_flower.config import provenance

CHECKOUT = Path(__file__).parents[2]
SOURCES = "vfl_flower", "strategies", "vfl_attacks", "pyproject.toml", "README.md", "LICENSE"


def copy_sources(folder: Path) -> None:
    """Make a folder with the files of this checkout that a wheel and a bundle are built from."""
    folder.mkdir()
    for name in SOURCES:
        if (CHECKOUT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(CHECKOUT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(CHECKOUT / name, folder)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and the packages that it depends on."""
    folder = tmp_path_factory.mktemp("installed")
    copy_sources(folder / "source")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*wheel, str(folder / "source")], check=True)
    (built,) = folder.glob("*.whl")
    home = folder / "environment"
    venv.create(home)
    site = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    # Its path files are not read there, so that this checkout cannot be imported.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [*pip, "--python", str(home / "bin" / "python"), "install", "--no-deps"]
    subprocess.run([*install, "--no-index", str(built)], check=True)
    return home


def run(environment: Path, folder: Path, *arguments: str) -> str:
    command = [str(environment / "bin" / arguments[0]), *arguments[1:]]
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.check_output(command, cwd=folder, env=kept, text=True)


@pytest.mark.nightly
def test_the_command_trains_predicts_and_reports_from_another_folder(
    environment: Path, tmp_path: Path
) -> None:
    where = run(environment, tmp_path, "python", "-c", "import vfl_flower as v; print(v.__file__)")
    assert str(environment) in where
    keys = "dataset='breast-cancer' epochs=2"
    for strategy in ("cascaded", "local-only"):
        more = f"{keys} strategy='{strategy}'"
        run(environment, tmp_path, "vfl", "run", "-c", more, "--out", str(tmp_path / strategy))
    run(environment, tmp_path, "vfl", "predict", str(tmp_path / "cascaded"))
    run(environment, tmp_path, "vfl", "report", str(tmp_path / "cascaded"))
    assert "<svg" in (tmp_path / "cascaded" / "report.html").read_text()
    (tmp_path / "strategies.py").write_text(  # a file of the user is not in the way
        "from vfl_flower.protocol.system import System\n"
        'MINE = System(name="mine", about="split-nn under another name.")\n'
    )
    more = f"{keys} strategy='strategies.py:MINE'"
    run(environment, tmp_path, "vfl", "run", "-c", more, "--out", str(tmp_path / "out"))


def test_an_import_beside_a_strategies_file_of_the_user_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "strategies.py").touch()
    python, own = [sys.executable, "-c", "import vfl_flower"], {"PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        python, cwd=tmp_path, env={**os.environ, **own}, capture_output=True, text=True
    )
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert f"Python finds {tmp_path / 'strategies.py'} instead of {CHECKOUT}" in said
    assert "Rename the other file or folder" in said


_DIGEST = "from vfl_flower.config.provenance import code_digest; print(code_digest())"


@pytest.mark.nightly
def test_its_code_has_the_digest_of_this_checkout(environment: Path, tmp_path: Path) -> None:
    here = subprocess.check_output([sys.executable, "-c", _DIGEST], cwd=CHECKOUT, text=True)
    assert run(environment, tmp_path, "python", "-c", _DIGEST) == here


def test_a_change_in_any_folder_changes_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    for package in ("vfl_flower", "strategies"):
        shutil.copytree(CHECKOUT / package, tmp_path / package, ignore=ignored)
    monkeypatch.setattr(provenance, "_HERE", tmp_path)
    seen = {provenance.code_digest.__wrapped__()}
    for name in ("protocol/codecs/qsgd", "../strategies/papers/vafl", "transport/wire"):
        with (tmp_path / "vfl_flower" / f"{name}.py").open("a") as file:
            file.write("# changed\n")
        seen.add(provenance.code_digest.__wrapped__())
    assert len(seen) == 4


def test_make_install_compiles_modules_whatever_the_environment_says(tmp_path: Path) -> None:
    site = tmp_path / "environment" / "lib" / "site-packages"
    for module in ("here/a.py", "here/tests/b.py"):
        (site / module).parent.mkdir(parents=True, exist_ok=True)
        (site / module).write_text("value = 1\n")
    (site / "here/other.py").write_text("print 'of another Python'\n")
    for package in ("vfl_flower", "strategies", "vfl_attacks"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "c.py").write_text("value = 1\n")
    for needed in ("pyproject.toml", "constraints.txt"):
        (tmp_path / needed).touch()

    say = ["make", "-n", "-f", str(CHECKOUT / "Makefile"), "VENV=environment", "install"]
    said = subprocess.run(say, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    (command,) = (line for line in said.splitlines() if "compileall" in line)
    assert command.startswith("environment/bin/python ")
    command = command.replace("environment/bin/python", sys.executable)
    slow = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(site)}
    subprocess.run([sys.executable, "-c", "import here.a"], env=slow, check=True)
    assert not list(tmp_path.rglob("*.pyc"))  # the control: a process leaves nothing for the next
    subprocess.run(command, shell=True, cwd=tmp_path, env=slow, check=True)
    compiled = {path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc")}
    assert compiled == {"a", "c"}


def test_the_bundle_has_each_file_that_code_at_a_node_reads(tmp_path: Path) -> None:
    copy_sources(tmp_path / "app")
    with ZipFile(BytesIO(build_fab_from_disk(tmp_path / "app"))) as bundle:
        packed = set(bundle.namelist())
    folders = (CHECKOUT / "vfl_flower", CHECKOUT / "strategies")
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    named = {path.relative_to(CHECKOUT).as_posix() for path in files}
    needed = {name for name in named if "__pycache__" not in name} - {
        *("vfl_flower/py.typed", "strategies/py.typed")
    }
    assert not needed - packed
    assert "vfl_flower/tasks/inference/serving/docs.toml" in packed
