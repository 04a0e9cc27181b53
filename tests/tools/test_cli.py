"""The `vfl` command: what it reads, refuses and prints, and what Flower's processes get of it."""

import os
import pty
import re
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from flwr.common.config import parse_config_args

from tests.conftest import Capsys, Patch
from vfl_attacks.audit import audit
from vfl_flower.config.errors import TERMINATING, ConfigError
from vfl_flower.config.node_rules import RULES
from vfl_flower.config.plugins import ENGINES, SYSTEMS
from vfl_flower.config.run_config import GROUPS, OPTIONS, flower_defaults
from vfl_flower.launch import processes
from vfl_flower.launch.processes import SuperLink
from vfl_flower.tools.cli import main
from vfl_flower.tools.compare import compare

COMMANDS = ("run", "compare", "audit", "predict", "report", "list", "doctor")
ODD = {
    "out": "runs/😀",
    "label": "a \"quoted\" \\ one, and 'another'",
    "class-weights": "two\nlines\tand a tab",
    "freeze": False,
    "party-lr": 1e-05,
    "epochs": 3,
    "min-parties": -1,
}


def refused(arguments: list[str], capsys: Capsys) -> str:
    """The sentence by which a command refuses to work."""
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("vfl: ")
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("vfl: ").rstrip("\n")


@pytest.fixture
def engine(tmp_path: Path) -> str:
    """A user's engine, which refuses with a description of the run."""
    file = tmp_path / "own.py"
    file.write_text(
        "from vfl_flower.config.errors import VflError\n"
        "def engine(parties, run_config, node_configs=()):\n"
        "    raise VflError(repr((parties, run_config, node_configs)))\n"
    )
    return f"{file}:engine"


# --- options ------------------------------------------------------------------------------------


def test_what_cannot_begin_leaves_no_folder(tmp_path: Path, capsys: Capsys) -> None:
    for line in ("run", "compare vafl", "audit --strategy vafl", "run --engine x"):
        refused([*line.split(), "--parties", "0", "--out", str(tmp_path / "out")], capsys)
        assert not (tmp_path / "out").exists()


def test_what_trains_anew_neither_resumes_nor_predicts(tmp_path: Path, capsys: Capsys) -> None:
    sentences = "An audit trains anew what it attacks: ", "A comparison trains every run anew: "
    for key in ("resume", "task", "model"):
        keys = {key: "predict" if key == "task" else str(tmp_path)}
        for command, sentence in zip(
            (["audit", "--strategy"], ["compare"]), sentences, strict=True
        ):
            words = [*command, "vafl", "-c", f"{key}='{keys[key]}'"]
            assert refused(words, capsys).startswith(f"{sentence}leave task, ")
        with pytest.raises(ConfigError, match="trains anew"):
            audit(2, {"strategy": "vafl", **keys})
        with pytest.raises(ConfigError, match="every run anew"):
            compare(2, {}, [{"strategy": "vafl", **keys}], 0.9)
    assert not list(tmp_path.iterdir())


def test_run_configurations_add_up_and_node_configurations_count_parties(
    engine: str, tmp_path: Path, capsys: Capsys
) -> None:
    out = str(tmp_path / "out")
    keys = ["-c", "epochs=1 label='a b'", "--run-config", "epochs=2"]
    nodes = ["--node-config", "file='a.csv'", "--node-config", "file='b.csv' id='name'"]
    sentence = refused(["run", *keys, *nodes, "--out", out, "--engine", engine], capsys)
    configs = [{"file": "a.csv"}, {"file": "b.csv", "id": "name"}]
    assert sentence == repr((2, {"epochs": 2, "label": "a b", "out": out}, configs))
    assert refused(["run", "--engine", engine], capsys).startswith("(4, ")
    assert refused(["run", "--engine", engine, "--parties", "3"], capsys).startswith("(3, ")


@pytest.mark.parametrize("number", TERMINATING)
def test_a_run_that_is_to_terminate_ends_by_an_exception_so_that_its_processes_end_too(
    tmp_path: Path, number: signal.Signals
) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import os\n"
        "def engine(*_, **__):\n"
        f"    os.kill(os.getpid(), {number.value})\n"
        "    raise AssertionError('not ended')\n"
    )
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        main(["run", "--engine", f"{file}:engine", "--out", str(tmp_path / "out")])
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is before


# --- help and listing ---------------------------------------------------------------------------


def test_help_of_each_command_fits_a_terminal_and_has_examples(
    monkeypatch: Patch, capsys: Capsys
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert "…" not in text
        examples = text.partition("examples:")[2].splitlines()
        assert any(line.strip().startswith(f"vfl {command} ") for line in examples)
        assert all(line.count('"') % 2 == 0 for line in examples)  # none is broken


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("words", "light"),
    [
        *((line, True) for line in ("run --help", "--help", "--version", "list", "list --all")),
        *((line, True) for line in ("list epochs", "trian")),
        ("list vafl", False),  # the control: it describes an estimator
    ],
)
def test_what_answers_at_once_waits_for_no_heavy_import(words: str, light: bool) -> None:
    """Torch alone takes seconds."""
    program = (
        f"import sys; from vfl_flower.tools.cli import main; main({words.split()});"
        "sys.exit(bool({'torch', 'flwr', 'pandas', 'numpy'} & sys.modules.keys()))"
    )
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    assert (subprocess.run([sys.executable, "-c", program], **quiet).returncode == 0) is light


def test_help_lists_commands_by_what_a_user_does(capsys: Capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"vfl-flower {version('vfl-flower')}, flwr ")
    assert main(["run", "--help"]) == 0
    of_run = capsys.readouterr().out
    assert all(f"{engine}: " in of_run for engine in ENGINES.known)
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f" {command} " in text for command in COMMANDS) and "examples:" in text
    _, _, *panels = text.split("╭─ ")
    titles = [panel.partition(" ─")[0] for panel in panels]
    assert titles == ["Train", "Use a model", "Judge a model", "Operate"]
    for title, command in zip(titles, ("run", "predict", "report", "doctor"), strict=True):
        assert f"│ {command} " in panels[titles.index(title)]


def test_a_system_may_follow_run(engine: str, tmp_path: Path, capsys: Capsys) -> None:
    words = ["--out", str(tmp_path / "out"), "--engine", engine]
    assert "'strategy': 'vafl'" in refused(["run", "vafl", *words], capsys)
    assert "'strategy': 'vafl'" in refused(["run", "vafl", "-c", "strategy='vafl'", *words], capsys)
    said = refused(["run", "vafl", "-c", "strategy='dpzv'", *words], capsys)
    assert said == "-c names strategy = 'dpzv', and the command vafl: leave one out."


# --- escape codes -------------------------------------------------------------------------------

_SHOWS = ("--help", "run --help", "list", "run vaffl", "doctor")
_QUIETLY = """
import logging, sys
from vfl_flower.tools.cli import main
code = main(sys.argv[1:])
logging.getLogger("flwr").error("a record")
"""


def _on_a_terminal(words: list[str], **more: str) -> str:
    """Run a command on a terminal; return all that it writes there."""
    outer, inner = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment = {**kept, "TERM": "xterm-256color", "FORCE_COLOR": "1", **more}
    command = [sys.executable, "-c", _QUIETLY, *words]
    process = subprocess.Popen(command, stdout=inner, stderr=inner, env=environment)
    os.close(inner)
    said = b""
    with os.fdopen(outer, "rb", buffering=0) as file, suppress(OSError):  # once it has ended
        while part := file.read(4096):
            said += part
    process.wait()
    return said.decode(errors="replace")


@pytest.mark.one_by_day
@pytest.mark.parametrize("line", _SHOWS)
def test_no_escape_codes_where_the_user_wants_none(line: str) -> None:
    assert "\x1b" in _on_a_terminal(line.split())  # the control
    assert "\x1b" not in _on_a_terminal(line.split(), NO_COLOR="1")
    command = [sys.executable, "-c", _QUIETLY, *line.split()]
    environment = {**os.environ, "FORCE_COLOR": "1", "GITHUB_ACTIONS": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "\x1b" not in done.stdout + done.stderr


def test_listing_is_plain_lines_where_it_is_no_terminal(monkeypatch: Patch, capsys: Capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["list", "--all"]) == 0
    text = capsys.readouterr().out
    assert not set("\x1b…─│╭╰") & set(text)
    lines = text.splitlines()
    assert "  batch-size = auto         Sets the rows of a mini-batch." in lines
    assert sum(line.startswith("  ") and line[2] != " " for line in lines) == len(
        (*OPTIONS, *RULES, *SYSTEMS.names)
    )
    flat = " ".join(text.split())
    assert all(each.summary in flat for each in OPTIONS.values())


def test_listing_in_a_terminal_shows_every_key_in_the_panel_of_its_section(
    monkeypatch: Patch, capsys: Capsys
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["list", "--all"]) == 0
    text = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert "…" not in text and {len(line) for line in text.splitlines() if line[0] in "╭│╰"} == {80}
    _, systems, *panels, rules = text.split("╭─")
    assert all(f"│ {name} " in systems for name in SYSTEMS.names)
    assert [panel.partition("─")[0].strip() for panel in panels] == [
        f"Options: {title}" for section, title in GROUPS.items() if section != "downlink"
    ]
    for section, panel in zip((each for each in GROUPS if each != "downlink"), panels, strict=True):
        here = [name for name, each in OPTIONS.items() if each.section == section]
        assert all(f"│ {name} = " in panel for name in here)
    assert all(f"│ {name} = " in rules for name in RULES)


@pytest.mark.nightly
def test_listing_into_a_pipe_that_is_closed_is_quiet() -> None:
    command = [sys.executable, "-m", "vfl_flower.tools.cli", "list"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait()


# --- what Flower's processes read ---------------------------------------------------------------


@pytest.fixture
def started(tmp_path: Path, monkeypatch: Patch) -> list[list[str]]:
    """The commands that a SuperLink starts, which are only remembered."""
    commands: list[list[str]] = []
    monkeypatch.setattr(SuperLink, "start", lambda self, command, log: commands.append(command))
    monkeypatch.setattr(processes, "stop", lambda process: None)
    return commands


@pytest.fixture
def superlink(started: list[list[str]], tmp_path: Path) -> SuperLink:
    link = SuperLink(simulation=False)
    link.home, link.port = tmp_path, 1
    return link


def read_by_flower(command: list[str], option: str) -> dict[str, Any]:
    return parse_config_args([command[command.index(option) + 1]])


def test_any_configuration_reaches_flower_as_it_is(
    superlink: SuperLink, started: list[list[str]], tmp_path: Path
) -> None:
    superlink.submit(ODD, 2, tmp_path / "log")
    sent = {"stream-address": "127.0.0.1", **ODD}  # else parties might look where a model's run was
    assert tomllib.loads((tmp_path / "run.toml").read_text(encoding="utf-8")) == sent
    read = read_by_flower(started[0], "--run-config")
    assert read == sent
    assert [type(read[key]) for key in ODD] == [type(value) for value in ODD.values()]
    [file] = Path(started[0][2]).iterdir()  # the app has every option and no code
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    assert content["project"]["name"] == "vfl-app"
    assert content["tool"]["flwr"]["app"]["config"] == flower_defaults()
    (tmp_path / "supernode-1").touch()  # else its key would be registered
    own = {"file": '😀/it\'s "mine".csv', "id": "back\\slash", "stream": True, "share": 0.5}
    with superlink.supernode(1, 3, own):
        read = read_by_flower(started[1], "--node-config")
    assert read == {**own, "partition-id": 1, "num-partitions": 3}
