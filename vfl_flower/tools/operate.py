"""Commands of `vfl` for those who use and operate a model."""

from pathlib import Path
from typing import Annotated

import typer

from vfl_flower.config.errors import Terminated, terminating
from vfl_flower.tools import options
from vfl_flower.tools.command import Command, NotifyingCommand

app = typer.Typer()


@app.command("report", cls=Command, epilog=options.REPORT_EXAMPLES)
def _report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    out: options.Page = None,
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
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    metric: options.Metric = "",
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
    from vfl_flower.launch.serving import serve_local, serve_supernodes

    _, keys, node_configs = options.given(run_config, node_config)
    if engine == "local":
        serve_local({**keys, "model": model}, node_configs)
        return
    try:
        with terminating():
            serve_supernodes({**keys, "model": model}, node_configs)
    except (KeyboardInterrupt, Terminated):
        print("The service has ended.")


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
