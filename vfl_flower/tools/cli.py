"""The `vfl` command."""

from __future__ import annotations

import errno
import logging
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperCommand

from vfl_flower.config.errors import ConfigError, Interrupted, Terminated, VflError, why
from vfl_flower.config.run_config import pairs
from vfl_flower.tools import options

app = typer.Typer(
    help="Vertical federated learning on Flower.",
    epilog=options.RUN_EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    try:
        return int(app(arguments, prog_name="vfl", standalone_mode=False) or 0)
    except click.ClickException as error:  # an unknown option, for one
        if "Did you mean" in error.message:  # by typer; click would ask so once more
            vars(error).update(possibilities=None)
        error.show()
        return error.exit_code


class _Command(TyperCommand):
    """A command whose errors become one sentence and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it, once its options are known: --help is not to wait for imports."""
        try:
            import flwr.app  # noqa: F401  (sets up its logger)

            logging.getLogger("flwr").setLevel(logging.WARNING)
            return super().invoke(ctx)
        except VflError as error:
            print(f"vfl: {error}", file=sys.stderr)
            raise typer.Exit(1) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            where = error.filename or "The disk"  # perhaps that of temporary files
            print(f"vfl: {where} is out of space: make some, and try again.", file=sys.stderr)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            print(f"vfl: {str(error) or 'stopped.'}", file=sys.stderr)
            raise typer.Exit(130) from error
        except Terminated as error:
            print(f"vfl: {error}", file=sys.stderr)
            raise


@app.command("run", cls=_Command, epilog=options.BASIC + options.RUN_EXAMPLES)
def _run(
    run_config: options.RunConfig = None,
    node_config: options.NodeConfig = None,
    parties: options.Parties = None,
    out: options.Out = "",
    engine: options.EngineName = "local",
    seeds: options.Seeds = 1,
    quiet: options.Quiet = False,
) -> None:
    """Train a system or baseline on this machine.

    Progress is one line on a terminal. Elsewhere it is one line per epoch.
    """
    from vfl_flower.config.plugins import ENGINES
    from vfl_flower.label_holder import checkpoint
    from vfl_flower.label_holder.figures import headline
    from vfl_flower.label_holder.progress import shown
    from vfl_flower.label_holder.results import results_folder
    from vfl_flower.launch.engines import Engine
    from vfl_flower.tools.seeds import repeated

    start: Engine = ENGINES.load(engine)
    keys, node_configs = options.keys(run_config, out), options.node_configs(node_config)
    config = checkpoint.configured(keys)
    if config.running.resume and keys.get("out"):
        raise ConfigError(
            "A resumed run goes on in its own folder: do not give --out or the option out."
        )
    earlier = config.running.resume or config.running.grow
    if earlier and parties is None and not node_configs:
        parties = len(checkpoint.load(earlier).strategy["seats"])
    folder = results_folder(config)
    logging.getLogger("flwr.notice").setLevel(logging.WARNING if quiet else logging.INFO)
    is_new = not folder.exists()
    number = options.number(parties, node_configs)
    try:
        with _ending_on_sigterm(), shown(not quiet):
            finished = repeated(start, number, keys, node_configs, seeds, folder)
        print(headline(finished.summary))
    except (KeyboardInterrupt, Terminated) as error:  # of a run on nodes: it keeps none anew
        if getattr(error, "folder", "") or not (folder / checkpoint.FILE).exists():
            raise
        kind = Terminated if isinstance(error, Terminated) else Interrupted
        raise kind(why(error), str(folder)) from error
    finally:
        left = (folder / ("top.npz" if seeds == 1 else "summary.json")).exists()
        if (is_new or config.running.resume) and left:
            print(f"results: {folder}")


@app.command("align", cls=_Command, epilog=options.ALIGN_EXAMPLES)
def _align(
    run_config: options.RunConfig = None,
    node_config: options.NodeConfig = None,
    engine: options.EngineName = "local",
) -> None:
    """Find the rows that all have, and keep them for runs and predictions to come.

    Every run does so by itself, if it has not been done for the ids that the
    files have now. Options are those of `vfl run`.
    """
    from vfl_flower.config.plugins import ENGINES
    from vfl_flower.launch.engines import Engine

    start: Engine = ENGINES.load(engine)
    node_configs = options.node_configs(node_config)
    logging.getLogger("flwr.notice").setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder, _ending_on_sigterm():
        keys = {**options.keys(run_config, str(Path(folder, "run"))), "task": "align"}
        summary = start(len(node_configs), keys, node_configs=node_configs).summary
    what = "are used" if summary["config"]["align"] == "any" else "are common to all"
    print(f"{summary['rows']} rows {what}, by alignment {summary['alignment']}.")


@app.command("compare", cls=_Command, epilog=options.COMPARE_EXAMPLES)
def _compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...")],
    run_config: options.RunConfig = None,
    node_config: options.NodeConfig = None,
    parties: options.Parties = None,
    out: options.Out = "",
    target: Annotated[float, typer.Option(help="Test accuracy to which bytes are counted.")] = 0.90,
    seeds: options.Seeds = 1,
    quiet: options.Quiet = False,
) -> None:
    """Several systems and the baselines on one data set: a table and a picture.

    RUN is a system, or in quotes a system and keys of its own, and before
    them, if you like, a title: "small steps: cascaded party-lr=0.01".

    All run in this process. Beside the systems stand the baselines frozen,
    alone and joined; their curves are drawn in one picture.
    """
    from vfl_flower.label_holder.progress import shown
    from vfl_flower.tools.compare import compare, table

    common, node_configs = options.keys(run_config, out), options.node_configs(node_config)
    if "strategy" in common:
        raise ConfigError("`vfl compare` takes its systems as arguments: leave strategy out of -c.")
    own = [_compared(text) for text in runs]
    number = options.number(parties, node_configs)
    with shown(not quiet):
        folder = compare(number, common, own, target, node_configs, seeds)
    print(table(folder))
    if not (folder / "centralised").exists():
        print("local-only and centralised are left out: they need gradients of the bottom models.")
    print(f"results: {folder}")


@app.command("sweep", cls=_Command, epilog=options.SWEEP_EXAMPLES)
def _sweep(
    system: Annotated[str, typer.Argument(metavar="SYSTEM")],
    search: Annotated[
        list[str],
        typer.Option(
            metavar='"KEY=... ..."',
            help="Keys, and what to search of each: a..b, a..b:log, or choices x|y|z.",
        ),
    ],
    trials: Annotated[int, typer.Option(min=1, help="How many, those of before included.")] = 40,
    run_config: options.RunConfig = None,
    node_config: options.NodeConfig = None,
    parties: options.Parties = None,
    seeds: options.Seeds = 1,
    jobs: Annotated[
        int, typer.Option(min=0, help="Trials at a time. Default: one for each core.")
    ] = 0,
    engine: Annotated[
        str, typer.Option(help="local: processes here; ray: a cluster, by RAY_ADDRESS, or here.")
    ] = "local",
    second: Annotated[
        str, typer.Option(help="Also: bytes, exchanges, epsilon or virtual-seconds, to be small.")
    ] = "",
    out: options.Out = "",
    quiet: options.Quiet = False,
) -> None:
    """Search keys of a system for what does best on the validation rows.

    Trials run side by side, in process; those whose curves fall behind are
    stopped early. The same command goes on where it ended, whatever ended it.
    """
    from vfl_flower.label_holder.progress import shown
    from vfl_flower.tools.sweep import sweep
    from vfl_flower.tools.sweep.results import table
    from vfl_flower.tools.sweep.workers import workers_on

    keys, node_configs = options.keys(run_config, out), options.node_configs(node_config)
    if "strategy" in keys:
        raise ConfigError("`vfl sweep` takes its system as argument: leave strategy out of -c.")
    with _ending_on_sigterm(), shown(not quiet):
        folder = sweep(
            options.number(parties, node_configs),
            {"strategy": system, **keys},
            search,
            trials,
            workers_on(engine, jobs),
            node_configs=node_configs,
            seeds=seeds,
            second=second,
        )
    print(table(folder))
    print(f"results: {folder}")


@app.command("audit", cls=_Command, epilog=options.AUDIT_EXAMPLES)
def _audit(
    strategy: Annotated[str, typer.Option(help="The system.")],
    run_config: options.RunConfig = None,
    parties: options.Parties = None,
    out: options.Out = "",
    known: Annotated[int, typer.Option(help="Labelled rows a class of some attackers.")] = 4,
) -> None:
    """Attack a system by what its messages carry, and tell how often that succeeds.

    Published attacks run in this process: inference of labels by a party or
    an eavesdropper, and of features by the label holder. They use the
    messages of party 0. Beside each success is that of guessing; one near it
    says that this attack found nothing, not that none would.

    Attacks marked * are on one epoch of two parties whose embeddings the
    server sums, which is the setting of Table I of the Cascaded paper; the
    others are on the run as configured. Where an epsilon is claimed, a game
    with canaries tries to refute it: what it shows must not exceed the claim.
    """
    from vfl_flower.tools.audit import audit
    from vfl_flower.tools.report.read import read
    from vfl_flower.tools.report.sections import audits

    keys = options.keys(run_config, out)
    if keys.get("strategy", strategy) != strategy:
        raise ConfigError(
            f"-c names strategy = {keys['strategy']!r}, and --strategy {strategy}: leave one out."
        )
    _, _, folder = audit(options.number(parties), {**keys, "strategy": strategy}, known)
    if found := audits(read([folder])):
        print(found.in_terminal())
    print(f"results: {folder}")


@app.command("predict", cls=_Command, epilog=options.PREDICT_EXAMPLES)
def _predict(
    model: Annotated[str, typer.Argument(metavar="RUN")],
    run_config: options.RunConfig = None,
    node_config: options.NodeConfig = None,
    out: Annotated[str, typer.Option(help=".csv or .parquet. Default: RUN/predictions.csv.")] = "",
    without: Annotated[
        str, typer.Option(help="Parties to leave out, as 0,3; their node configurations too.")
    ] = "",
) -> None:
    """Predict by the model of a run: the test rows, or rows of new files.

    RUN is the results folder of the run. The parties' states are to lie in
    it, as runs on this machine leave them. With files, -c names the label
    holder's new one, and what differs from training.
    """
    from vfl_flower.launch.engines import predict_local

    keys = {**options.keys(run_config, out), "model": model}
    keys |= {"without": without} if without else {}
    logging.getLogger("flwr.notice").setLevel(logging.INFO)
    print(f"predictions: {predict_local(keys, options.node_configs(node_config))}")


@app.command("report", cls=_Command, epilog=options.REPORT_EXAMPLES)
def _report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    out: Annotated[
        Path | None,
        typer.Option(help="Default: report.html in RUN, or of several in the folder above them."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve it on this machine, kept up to date.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="For --watch. Default: any.")] = 0,
) -> None:
    """One HTML page about runs, comparisons, sweeps and audits.

    RUN is the results folder of one of them, or a folder of such folders, as
    runs/ is. The page shows what runs reached
    and what they took, curves, bytes and delays by party, privacy, attacks
    and settings. It is one file that loads nothing; an earlier report is
    replaced. With --watch it is served instead, at an address of this machine
    that is printed, and follows what the runs write until Ctrl-C.
    """
    from vfl_flower.config.files import write_whole
    from vfl_flower.tools.report import above, report
    from vfl_flower.tools.watch import watch as serve

    folders = [each.expanduser() for each in runs]
    if watch and out:
        raise VflError("A page that is watched is not written: leave out --out, or --watch.")
    if watch:
        serve(folders, port)
        return
    page = out.expanduser() if out else above(folders) / "report.html"
    if page.suffix != ".html":
        raise VflError(f"{page} would be a page: let --out end in .html.")
    text = report(folders)
    try:
        write_whole(page, text.encode("utf-8", errors="xmlcharrefreplace"))
    except VflError as error:
        raise VflError(f"{error} Or name another file by --out.") from error
    print(f"report: {page}")


@app.command("contribution", cls=_Command)
def _contribution(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    metric: Annotated[
        str, typer.Option(help="accuracy, auc, log-loss (its fall) or r2. Default: by the labels.")
    ] = "",
) -> None:
    """What each party is worth to a model that predicts by any subset.

    RUN is the results folder of a run with partial rows or subsets='sampled'.
    The value of a party is its Shapley value on the test rows: what it adds
    to those before it, on average over all orders of the parties. Nobody is
    asked for anything; the values are kept in RUN/contribution.json, for the
    report.
    """
    from vfl_flower.label_holder.contribution import contribution
    from vfl_flower.tools.report.read import read
    from vfl_flower.tools.report.subsets import worth

    contribution(run.expanduser(), metric)
    if found := worth(read([run.expanduser()])):
        print(found.in_terminal())


@app.command("list", cls=_Command, epilog=options.LIST_EXAMPLES)
def _list(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME|WORD...]", help="A name to explain, or words to search."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="List every option and party rule, not only basic ones.")
    ] = False,
) -> None:
    """List systems, baselines and basic options; explain or search them.

    With the NAME of a system, an option or a party rule, print all about it.
    With other words, print every entry whose name or help text has them.
    """
    from vfl_flower.tools import listing

    listing.show(words or (), every)


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Have SIGTERM end this process so that Flower's processes end too."""
    from strategies.signals import end_by_sigterm

    before = signal.signal(signal.SIGTERM, end_by_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _compared(text: str) -> dict[str, Any]:
    """A RUN of `vfl compare`: perhaps a title, a system, and keys of its own."""
    from vfl_flower.config.plugins import SYSTEMS
    from vfl_flower.config.renamed import accepted, notify

    title, _, rest = text.partition(": ")
    first = accepted("strategy", rest.split()[0]) if rest.strip() else ""
    titled = bool(first) and ("=" not in title or first in SYSTEMS.names)
    name, *keys = (rest if titled else text).split(None, 1) or [""]
    if not name or (titled and not title):
        raise ConfigError("A run of `vfl compare` is empty: name a system, then its own keys.")
    own = pairs(keys, "RUN")
    notify({"strategy": name})
    if {"strategy", "out"} & own.keys():
        raise ConfigError(f"{text!r} names a strategy or out twice: write the system first.")
    return {"strategy": name, **own, **({"title": title} if titled else {})}


if __name__ == "__main__":
    sys.exit(main())
