"""Tasks that are forked from a warm process: what they share, and what they must not share."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from tests.fleet import until
from vfl_flower.transport.nodes import warm as of_nodes
from vfl_flower.transport.nodes.superlink import NEEDED
from vfl_flower.transport.nodes.warm import WarmTasks

CHECKOUT = Path(__file__).parents[2]
TELLS = """\
import json, os, random, secrets, signal, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[-1]).parent))
import kept_module, fresh_module
import numpy, torch
from vfl_flower.config.provenance import code_digest

Path(sys.argv[-1]).write_text(json.dumps({
    "random": random.random(), "numpy": numpy.random.random(), "secret": secrets.token_hex(8),
    "pid": os.getpid(), "parent": os.getppid(), "input": sys.stdin.read(),
    "kept": kept_module.BY, "fresh": fresh_module.BY,
    "name": Path("/proc/self/comm").read_text(),
    "words": Path("/proc/self/cmdline").read_text(), "given": sys.argv[1:],
    "ctrl_c": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "cuda": torch.cuda.is_initialized(), "code": code_digest(),
}))
raise SystemExit(3)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an installed package whose command `tells` writes what it sees to a file."""
    waits = "import sys\ndef wait():\n    open(sys.argv[1]).read()\n"
    (tmp_path / "tells.py").write_text(f"{waits}def main():\n    exec({TELLS!r})\n")
    for name in ("kept_module", "fresh_module"):
        (tmp_path / f"{name}.py").write_text("import os\nBY = os.getpid()\n")
    last = f"from pathlib import Path\nPath({str(tmp_path)!r}, 'imported').touch()\n"
    (tmp_path / "last_module.py").write_text(last)
    about = tmp_path / "tells-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tells\nVersion: 1\n")
    scripts = "[console_scripts]\ntells = tells:main\nwaits = tells:wait\n"
    (about / "entry_points.txt").write_text(scripts)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


@pytest.fixture
def tasks(place: Path) -> Iterator[WarmTasks]:
    modules = ["kept_module", "fresh_module", "torch", "not_installed", "last_module"]
    warm = WarmTasks(modules, fresh=["fresh_module"])
    yield warm
    assert warm._process.stdin
    warm._process.stdin.close()
    assert warm._process.wait(timeout=60) == 0


def told(path: Path) -> dict[str, Any]:
    until(lambda: path.exists() and path.read_text().endswith("}"))
    return json.loads(path.read_text())


def test_tasks_share_modules_but_no_random_numbers_and_no_argument_shows_the_token(
    tasks: WarmTasks, place: Path
) -> None:
    until((place / "imported").exists)
    first, second = place / "1.json", place / "2.json"
    for path in (first, second):
        tasks.start(["tells", "--token", "secret", str(path)], quiet=True)
    one, two = told(first), told(second)
    warm = tasks._process.pid
    for each in (one, two):
        assert each["parent"] == each["kept"] == each["fresh"] == warm  # imported there, once
        assert each["pid"] != warm
        assert "secret" not in each["words"] and "secret" in each["given"]
        assert each["input"] == "" and each["ctrl_c"] and not each["cuda"]
        assert each["name"] == "tells\n"
    for name in ("random", "numpy", "secret", "pid"):
        assert one[name] != two[name]
    # A package that the run brings is imported by the task.
    (place / "own").mkdir()
    shutil.copy(place / "fresh_module.py", place / "own")
    tasks.start(["tells", str(place / "own" / "1.json")], quiet=True)
    found = told(place / "own" / "1.json")
    assert found["fresh"] == found["pid"] and found["kept"] == warm
    # A task starts although the warm process was killed.
    tasks._process.kill()
    tasks._process.wait()
    tasks.start(["tells", str(place / "3.json")], quiet=True)
    assert told(place / "3.json")["parent"] == tasks._process.pid != warm


@pytest.mark.parametrize("upgraded", [False, True])
def test_a_package_whose_files_have_changed_is_imported_anew(
    upgraded: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(place))
    before = import_module("fresh_module")
    digest = Mock(return_value="before")
    digest.__wrapped__ = lambda: "after" if upgraded else "before"
    monkeypatch.setattr(of_nodes, "code_digest", digest)
    monkeypatch.delitem(sys.modules, "fresh_module")
    monkeypatch.setattr(
        sys, "meta_path", [of_nodes._Kept({"fresh_module": before}), *sys.meta_path]
    )
    own = before.__spec__
    assert (import_module("fresh_module") is before) != upgraded
    assert before.__spec__ is own and own and own.origin == before.__file__
    assert not any(isinstance(each, of_nodes._Kept) for each in sys.meta_path)


@pytest.mark.nightly
def test_a_task_waits_for_the_first_import_alone(tasks: WarmTasks, place: Path) -> None:
    """Its order comes before the process has begun."""
    tasks.start(["tells", str(place / "1.json")], quiet=True)
    found = told(place / "1.json")
    assert found["kept"] == found["parent"] == tasks._process.pid
    assert found["fresh"] == found["pid"] and not (place / "imported").exists()


def test_nothing_is_imported_while_a_task_runs(place: Path) -> None:
    """A service would miss the processor that imports take."""
    os.mkfifo(place / "end")
    begin = "from vfl_flower.transport.nodes import warm; warm._IDLE = 0.05; "
    begin += "warm._fork_for_each_order(['kept_module', 'last_module'], [])"
    warm = subprocess.Popen([sys.executable, "-c", begin], stdin=subprocess.PIPE, bufsize=0)
    assert warm.stdin
    warm.stdin.write(json.dumps([["waits", str(place / "end")], True]).encode() + b"\n")
    with open(place / "end", "w"):  # it is open once the task reads it
        time.sleep(0.2)
        assert not (place / "imported").exists()
    until(lambda: (place / "imported").exists())
    warm.stdin.close()
    assert warm.wait(60) == 0


@pytest.mark.nightly
def test_a_task_names_the_code_that_it_runs_even_if_the_files_have_changed(
    place: Path, request: pytest.FixtureRequest
) -> None:
    """Else a SuperNode that nobody has restarted after an upgrade would pass for upgraded."""
    for name in ("vfl_flower", "strategies"):
        shutil.copytree(CHECKOUT / name, place / name)
    tasks: WarmTasks = request.getfixturevalue("tasks")
    found = []
    for number in range(2):
        tasks.start(["tells", str(place / f"{number}.json")], quiet=True)
        found.append(told(place / f"{number}.json")["code"])
        with open(place / "vfl_flower" / "client_app.py", "a") as source:
            source.write("# A later version.\n")
    now = [sys.executable, "-P", "-c", "from vfl_flower.config import provenance as p; "]
    now[-1] += "print(p.__file__, p.code_digest())"
    file, after = subprocess.run(now, capture_output=True, text=True, check=True).stdout.split()
    assert Path(file).is_relative_to(place) and found == [found[0]] * 2
    assert found[0] != after  # the control


def test_the_warm_process_ends_with_the_one_that_orders(place: Path) -> None:
    code = (
        "from vfl_flower.transport.nodes.warm import WarmTasks; import time; "
        "print(WarmTasks(['json'])._process.pid, flush=True); time.sleep(600)"
    )
    orders = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert orders.stdout
    warm = psutil.Process(int(orders.stdout.readline()))
    orders.kill()
    orders.wait()
    until(lambda: not warm.is_running() or warm.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.nightly
def test_nothing_that_is_imported_uses_a_gpu() -> None:
    """A fork of a process that uses CUDA cannot use CUDA."""
    modules = sorted({*NEEDED["superlink"], *NEEDED["supernode"]})
    code = (
        "import importlib, torch\n"
        "def asked(*_, **__): raise SystemExit('asked')\n"
        "for name in ('is_available', 'device_count', 'current_device', '_lazy_init'):\n"
        "    assert hasattr(torch.cuda, name); setattr(torch.cuda, name, asked)\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        "print('imported')\n"
        "try: torch.cuda.is_available()\n"
        "except SystemExit: print('control')\n"
    )
    environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "0"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert ran.stdout.split() == [b"imported", b"control"], ran.stderr
