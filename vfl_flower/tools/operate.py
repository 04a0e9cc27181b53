"""Commands of `vfl` for those who use and operate a model."""

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from vfl_flower.config.errors import Terminated, terminating
from vfl_flower.tools import options
from vfl_flower.tools.command import Command, NotifyingCommand

app = typer.Typer()
audit_log = typer.Typer(
    help="Verify the audit log of a service, or find the requests for an id.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_APART = {"line", "time", "event", "ids", "before"}  # fields that `find` prints apart, or not


@app.command("report", cls=Command, epilog=options.REPORT_EXAMPLES)
def _report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")], out: options.Page = None
) -> None:
    """Write one HTML page about runs, comparisons, sweeps and audits.

    RUN is the results folder of one of them, or a folder of such folders, such
    as runs/. The page shows what runs reached and spent: curves, bytes and
    delays by party, privacy, attacks and settings. It is one file that loads
    nothing, and it replaces an earlier report. The card of a RUN with the file
    card.toml is written again: this file names owner, purpose and approval.
    """
    from vfl_flower.results.model_card import GIVEN, write_card
    from vfl_flower.results.report import write_report

    folders = [each.expanduser() for each in runs]
    print(f"report: {write_report(folders, out)}")
    for each in folders:
        if (each / GIVEN).is_file():
            write_card(each)


@app.command("contribution", cls=Command)
def _contribution(
    run: Annotated[Path, typer.Argument(metavar="RUN")], metric: options.Metric = ""
) -> None:
    """Print what each party is worth to a model that predicts with any subset of parties.

    RUN is the results folder of a run with partial rows or subsets='sampled'.
    A party's value is its Shapley value on the test rows: what it adds to the
    parties before it, on average over all orders. No party is asked for
    anything. RUN/contribution.json keeps the values for the report.
    """
    from vfl_flower.results.report.read import read
    from vfl_flower.results.report.segments import worth
    from vfl_flower.tasks.inference.contribution import contribution

    contribution(run.expanduser(), metric)
    if found := worth(read([run.expanduser()])):
        print(found.in_terminal())


@app.command("explain", cls=NotifyingCommand, epilog=options.EXPLAIN_EXAMPLES)
def _explain(
    model: Annotated[str, typer.Argument(metavar="RUN")],
    run_config: options.RunConfig = None,
    node_config: options.NodeConfig = None,
    repeats: options.Repeats = 1,
    without: options.Without = "",
) -> None:
    """Print what each feature is worth to the model of a run; names stay at their party.

    Each party permutes one of its features at a time. A feature is worth what
    AUC, accuracy or R2 then loses. RUN/explanation.json numbers the features.
    Each party writes a table and a picture with its names, beside its states.

    The rows are the test rows of the run. With another file of labels in -c,
    they are the rows of that file.
    """
    from vfl_flower.launch.engines import explain_local
    from vfl_flower.results.report import features
    from vfl_flower.tasks.inference.explanation import FILE

    _, keys, node_configs = options.given(run_config, node_config)
    keys |= {"model": model, **({"without": without} if without else {})}
    keys.setdefault("repeats", repeats)
    explain_local(keys, node_configs)
    out = Path(str(keys.get("out") or model)).expanduser().absolute()
    print(features.in_terminal(out, "explanation"))
    print(f"explanation: {out / FILE}")


@app.command("evaluate", cls=NotifyingCommand, epilog=options.EVALUATE_EXAMPLES)
def _evaluate(
    model: Annotated[Path, typer.Argument(metavar="RUN")],
    labels: options.LabelsFile,
    predictions: options.KeptPredictions = None,
    run_config: options.RunConfig = None,
) -> None:
    """Judge the predictions of a run by outcomes that were known later.

    RUN is the results folder of the run. People are joined by id. The file of
    labels has the columns of the label holder's file in training, or -c names
    them. With a column of dates (time), figures are by month too. A JSON file
    and a page stand beside the predictions.
    """
    from vfl_flower.config.files import write_whole
    from vfl_flower.results.page import html
    from vfl_flower.results.report.page import evaluation
    from vfl_flower.results.report.read import read
    from vfl_flower.tasks.inference.evaluation import evaluate

    _, keys, _ = options.given(run_config, None)
    out, found = evaluate(model.expanduser(), labels, predictions, keys)
    page = evaluation(read([model.expanduser()])[0], found)
    write_whole(out.with_suffix(".html"), html(page).encode(errors="replace"))
    for section in page.shown:
        print(section.in_terminal())
    print(f"evaluation: {out}, {out.with_suffix('.html').name}")


@app.command("distil", cls=NotifyingCommand, epilog=options.DISTIL_EXAMPLES)
def _distil(
    model: Annotated[str, typer.Argument(metavar="RUN")],
    run_config: options.RunConfig = None,
    node_config: options.NodeConfig = None,
    out: options.Out = "",
) -> None:
    """Distil the model of a run into one that predicts without the parties.

    RUN is the results folder of the run. Its parties embed the people once. A
    model of the label holder's own columns then learns the scores. Its folder is
    RUN/distilled: predict, serve and judge it like any run. People without labels
    help: -c names a file that has them beside the people of the run.
    """
    from vfl_flower.launch.engines import distil_local
    from vfl_flower.results.figures import headline
    from vfl_flower.results.terminal import wrapped

    _, keys, node_configs = options.given(run_config, node_config, out=out)
    finished = distil_local({**keys, "model": model}, node_configs)
    print(wrapped(*headline(finished.summary).splitlines()))
    print(f"results: {finished.folder}")


@app.command("serve", cls=NotifyingCommand, epilog=options.SERVE_EXAMPLES)
def _serve(
    model: Annotated[str, typer.Argument(metavar="RUN")],
    run_config: options.RunConfig = None,
    node_config: options.NodeConfig = None,
    engine: options.ServeEngine = "local",
) -> None:
    """Answer requests for scores over HTTP, with the model of a run, until Ctrl-C.

    RUN is the results folder of the run. It holds the parties' states if the
    run was on this machine. The service prints its address, and the file of its
    token. With new files, -c names the label holder's file.
    """
    from vfl_flower.launch.engines import used
    from vfl_flower.launch.serving import serve_supernodes

    _, keys, node_configs = options.given(run_config, node_config)
    if engine == "local":
        used("serve", {**keys, "model": model}, node_configs)
        return
    try:
        with terminating():
            serve_supernodes({**keys, "model": model}, node_configs)
    except (KeyboardInterrupt, Terminated):
        print("The service has ended.")


@app.command("doctor", cls=Command, epilog=options.DOCTOR_EXAMPLES)
def _doctor(
    folders: Annotated[list[Path] | None, typer.Argument(metavar="[FOLDER...]")] = None,
    superlink: options.SuperLink = "",
    stream_ports: options.StreamPorts = "",
    compare: options.Compare = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
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


@app.command("forget", cls=Command, epilog=options.FORGET_EXAMPLES)
def _forget(
    id_file: options.IdFile,
    folders: Annotated[list[Path] | None, typer.Argument(metavar="[FOLDER...]")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List, and change nothing.")] = False,
) -> None:
    """Remove people from this organisation's files, and keep them out of later work.

    FOLDER is a folder of runs, of a party's states or of predictions, with all
    that is in it. The folder of alignments is searched too. First, the people go
    on a list of keyed hashes. From then on, no alignment, training, report or
    score of this organisation has them. The weights of trained models stay. If
    the command was interrupted, repeat it.
    """
    from vfl_flower.tools.forget import forget

    forget(id_file.expanduser(), folders or [], dry_run)


def information(
    model: Annotated[str, typer.Argument(metavar="[RUN]", show_default=False)] = "",
    run_config: options.RunConfig = None,
    node_config: options.NodeConfig = None,
    parties: options.Parties = None,
    out: options.Out = "",
    engine: options.EngineName = "local",
) -> None:
    """Compute the information value of each column, before any model exists.

    The label holder sends labels with noise, or answers exact counts by bin.
    Each party bins its own columns, and keeps a table and a picture of them.
    The label holder gets the values by number, in information.json.

    With RUN, the results folder of a run, get figures of its model by groups of
    the parties' columns. A party names these columns by segments.
    """
    from vfl_flower.config.plugins import ENGINES
    from vfl_flower.launch.engines import used
    from vfl_flower.results.report import features
    from vfl_flower.results.report.read import read
    from vfl_flower.results.report.segments import segments

    start = ENGINES.load(engine)
    number, keys, node_configs = options.given(run_config, node_config, parties, out)
    keys["task"] = "information"
    if model:
        done = used("information", {**keys, "model": model}, node_configs)
        print(*(each.in_terminal() for each in [segments(read([Path(done.model)]))] if each))
        return
    with terminating():
        folder = start(number, keys, node_configs=node_configs).folder
    print(features.in_terminal(folder, "information"))
    print(f"results: {folder}")


@audit_log.command("verify", cls=Command, epilog=options.VERIFY_EXAMPLES)
def _verify(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...")],
    noted: options.Noted = "",
    after: options.After = "",
) -> None:
    """Check that no line was cut, changed, added or moved; else name the line.

    Each line holds the digest of the line before, and FILE.seal the last one.
    Whoever can write to the folder as its owner can write the whole log anew.
    So note the last digest elsewhere, and give it to --noted later.

    Name all files of the log, the oldest first. The last one has the seal.
    If older files are no longer kept, give the last digest of the newest of
    them to --after, as you noted it.
    """
    from vfl_flower.config.audit_chain import verify

    found = verify(*files, noted=noted, after=after)
    print(f"{found.lines} lines, from {found.first} to {found.last}. No line is missing.")
    for place in found.torn:
        print(f"{place} is torn: its process was killed while it wrote that line.")
    if found.unsealed:
        print(f"{found.unsealed} lines follow the last seal: nobody can tell yet whether more did.")
    if found.earlier.digest:
        print(f"{found.earlier.lines} earlier lines, up to --after, were not verified.")
    print(f"last digest: {found.digest}")


@audit_log.command("find", cls=Command, epilog=options.FIND_EXAMPLES)
def _find(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    ids: Annotated[list[str], typer.Argument(metavar="ID...")],
) -> None:
    """Print the requests that asked for an id.

    The log holds a keyed hash of each id. The key, audit-log.key, must lie
    beside FILE. Verify the log first: this command does not.
    """
    from vfl_flower.config.audit_chain import find
    from vfl_flower.data.ids import encoded

    names = {encoded(each): each for each in ids}
    left = dict.fromkeys(ids)
    for one, fields in find(file, names):
        left.pop(names[one], None)
        rest = [f"{name} {_said(value)}" for name, value in fields.items() if name not in _APART]
        where = f"line {fields['line']}", fields["time"], fields["event"]
        print(f"{names[one]}: {', '.join((*where, *rest))}")
    for each in left:
        print(f"{each}: no line has it.")


def _said(value: object) -> str:
    """Return a field in one line."""
    if isinstance(value, list):
        return "+".join(map(_said, value))
    return ascii(value)[1:-1] if isinstance(value, str) else str(value)
