"""`vfl doctor`: check an installation, and say what to do about each finding."""

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

Folders = Annotated[list[Path] | None, typer.Argument(metavar="[FOLDER...]")]
SuperLink = Annotated[
    str,
    typer.Option(metavar="HOST:PORT", help="Also check the SuperLink, as parties reach it."),
]
StreamPorts = Annotated[
    str, typer.Option(metavar="PORTS", help="The option stream-ports, if no run is named.")
]
Compare = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Output of --json at another organisation, to compare."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def doctor(
    folders: Folders = None,
    superlink: SuperLink = "",
    stream_ports: StreamPorts = "",
    compare: Compare = None,
    as_json: Json = False,
) -> int:
    """Check this machine, keys, certificates, the network, disks and runs.

    FOLDER is the folder of deploy/superlink.sh or of deploy/supernode.sh, a
    party's states, or the results folder of a run. Each finding is a line: what
    was checked, its result, and what to do. The exit code is 0 if all is well,
    and 1 after a warning or a problem. Nothing is changed.
    """
    from vfl_flower.results.terminal import tabulated
    from vfl_flower.tools.doctor.examine import examine, in_words
    from vfl_flower.tools.doctor.finding import PROBLEM, WARNING, printable
    from vfl_flower.tools.doctor.machine import description

    logging.getLogger("flwr").setLevel(logging.ERROR)  # findings say what it would
    found = [printable(each) for each in examine(folders or [], superlink, stream_ports, compare)]
    if as_json:
        findings = [each._asdict() for each in found]
        print(json.dumps({**description(), "findings": findings}, indent=2))
    else:
        drawn = tabulated(("check", "result", "finding"), found, texts=3)
        print(drawn, in_words(found), sep="\n")
    return int(any(each.result in (WARNING, PROBLEM) for each in found))
