"""deploy/run.sh, with a `flwr` that does what a test says."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleet import until

SCRIPT = Path(__file__).parents[2] / "deploy/run.sh"
# $RUNS has a file with the status of each run. Without the file `up`, no call is answered.
FLWR = """#!/usr/bin/env bash
echo "$*" >> "$RUNS/calls"
case "$1 $2" in
    "list vfl")
        [ -f "$RUNS/up" ] || { echo '{"success": false, "error-message": "unavailable"}'; exit; }
        [ -f "$RUNS/$4" ] || { echo '{"success": false, "error-message": "Run not found"}'; exit; }
        echo "{\\"runs\\": [{\\"status\\": \\"$(cat "$RUNS/$4")\\"}]}" ;;
    "run "*)
        number=$(($(ls "$RUNS" | grep -c run-) + 1))
        echo running > "$RUNS/run-$number"
        echo "{\\"run-id\\": \\"run-$number\\"}" ;;
    "log "*)
        [ -f "$RUNS/up" ] || exit 1
        while grep -q running "$RUNS/$2"; do /bin/sleep 0.05; done ;;
    "stop "*) echo finished:stopped > "$RUNS/$2" ;;
esac
"""


class Deployed:
    """A folder of a SuperLink, and scripts that start runs there."""

    def __init__(self, folder: Path) -> None:
        self.runs, self.folder, self.bin = folder / "runs", folder / "keys", folder / "bin"
        for each in (self.runs, self.folder, self.bin):
            each.mkdir()
        self.write("flwr", FLWR)
        self.write("sleep", "#!/bin/sh\nexec /bin/sleep 0.02\n")
        self.write("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (self.runs / "up").touch()
        self.scripts: list[subprocess.Popen[str]] = []

    def write(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o700)

    def start(self, options: str) -> subprocess.Popen[str]:
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        script = subprocess.Popen(
            [SCRIPT, self.folder, options],
            env={**os.environ, "PATH": path, "RUNS": str(self.runs)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.scripts.append(script)
        return script

    def killed(self, options: str) -> None:
        """Start the first run, and kill its script; `flwr log` goes on as under no manager."""
        script = self.start(options)
        self.follows("run-1")
        script.kill()
        script.wait()

    def follows(self, run: str, times: int = 1) -> None:
        """Wait until so many scripts have shown the log of a run."""
        until(lambda: self.calls.count(f"log {run} vfl --stream") >= times, 30)

    def end(self, run: str, status: str = "finished:completed") -> None:
        (self.runs / run).write_text(status)

    @property
    def calls(self) -> list[str]:
        calls = self.runs / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    @property
    def started(self) -> int:
        return sum(each.startswith("run ") for each in self.calls)


@pytest.fixture
def deployed(tmp_path: Path):  # type: ignore[no-untyped-def]
    found = Deployed(tmp_path)
    yield found
    for script in found.scripts:
        try:
            os.killpg(script.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        script.wait()
        assert script.stdout
        script.stdout.close()


def said(script: subprocess.Popen[str]) -> str:
    return script.communicate(timeout=30)[0]


def test_a_script_that_was_killed_goes_on_with_its_run(deployed: Deployed) -> None:
    deployed.killed("task='serve'")
    again = deployed.start("task='serve'")
    deployed.follows("run-1", 2)
    deployed.end("run-1")
    assert "Run run-1 goes on, whose script was killed." in said(again)
    assert again.returncode == 0 and deployed.started == 1
    third = deployed.start("task='serve'")  # the control: that run is over
    deployed.follows("run-2")
    deployed.end("run-2", "finished:failed")
    assert "goes on" not in said(third) and third.returncode == 1 and deployed.started == 2
    assert not [*(deployed.folder / "started").iterdir()]


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("task='serve' model='a'", "task='serve' model='b'"),  # at the default address
        tuple(f"task='serve' model='{each}' serve-address='h:1'" for each in "ab"),
        ("epochs=3 out='/runs/1'", "epochs=4 out='/runs/1'"),
        ("epochs=3 out='/runs/1'", "resume='/runs/1'"),
    ],
)
def test_it_ends_a_run_that_would_be_in_its_way(then: str, now: str, deployed: Deployed) -> None:
    deployed.killed(then)
    again = deployed.start(now)
    deployed.follows("run-2")
    assert deployed.calls.index("stop run-1 vfl") < deployed.calls.index("log run-2 vfl --stream")
    again.terminate()
    assert "Run run-1 is ended" in said(again) and again.returncode == 143
    assert "stop run-2 vfl" in deployed.calls


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "other", ["task='serve' model='b' serve-address='h:2'", "task='predict' model='a'", "epochs=3"]
)
def test_it_leaves_the_run_of_another_script_that_was_killed(
    other: str, deployed: Deployed
) -> None:
    """That script is about to start again, and goes on with its run."""
    deployed.killed("task='serve' model='a' serve-address='h:1'")
    deployed.start(other)
    deployed.follows("run-2")
    assert not any(each.startswith("stop") for each in deployed.calls)
    deployed.start("task='serve' model='a' serve-address='h:1'")
    deployed.follows("run-1", 2)
    assert deployed.started == 2


def test_a_run_whose_script_lives_is_left_alone(deployed: Deployed) -> None:
    first = deployed.start("dataset='files:a.csv'")
    deployed.follows("run-1")
    second = deployed.start("dataset='files:a.csv'")  # the same options, in another folder perhaps
    deployed.follows("run-2")
    assert not any(each.startswith("stop") for each in deployed.calls)
    for number, script in enumerate((first, second), 1):
        deployed.end(f"run-{number}")
        said(script)
        assert script.returncode == 0


def test_a_superlink_that_does_not_answer_for_a_while_ends_no_script(deployed: Deployed) -> None:
    script = deployed.start("task='serve'")
    deployed.follows("run-1")
    (deployed.runs / "up").unlink()
    deployed.end("run-1", "running again")  # its log breaks off too
    listed = "list vfl --run-id run-1 --format json"
    deployed.end("run-1", "no answer")
    until(lambda: deployed.calls.count(listed) >= 3, 30)
    assert script.poll() is None
    deployed.end("run-1")
    (deployed.runs / "up").touch()
    text = said(script)
    assert script.returncode == 0 and text.count("It is asked again") == 1
    assert "Run run-1: finished:completed" in text
    script = deployed.start("task='serve'")
    deployed.follows("run-2")
    (deployed.runs / "up").unlink()
    deployed.end("run-2", "no answer")
    until(lambda: deployed.calls.count(listed.replace("run-1", "run-2")) >= 2, 30)
    script.terminate()  # which ends it at any time
    said(script)
    assert script.returncode == 143 and "stop run-2 vfl" in deployed.calls


def test_a_script_says_who_has_stopped_its_run_or_that_it_is_lost(deployed: Deployed) -> None:
    for number, status in enumerate(("finished:stopped", "finished:failed"), 1):
        script = deployed.start("task='train'")
        deployed.follows(f"run-{number}")
        deployed.end(f"run-{number}", status)
        text = said(script)
        assert f"Run run-{number}: {status}" in text and script.returncode == 1
        assert ("The label holder has ended it by `flwr stop`" in text) == (number == 1)
    script = deployed.start("task='train'")
    deployed.follows("run-3")
    (deployed.runs / "run-3").unlink()
    assert "Run run-3: lost" in said(script) and script.returncode == 1


def test_a_run_that_does_not_start_is_told(deployed: Deployed) -> None:
    deployed.write("flwr", '#!/bin/sh\necho \'{"success": false, "error-message": "No."}\'\n')
    script = deployed.start("task='serve'")
    assert "No." in said(script) and script.returncode == 1
