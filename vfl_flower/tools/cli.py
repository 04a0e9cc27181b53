"""The `vfl` command."""

from __future__ import annotations

import errno
import logging
import re
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

from vfl_flower.config import pairs
from vfl_flower.errors import ConfigError, VflError

_PAIRS = '"KEY=VALUE ..."'

_RunConfig = Annotated[
    list[str] | None,
    typer.Option(
        *("-c", "--run-config"),
        metavar=_PAIRS,
        help="Configuration, as for `flwr run`; texts in quotes. `vfl list` names the keys.",
    ),
]
_NodeConfig = Annotated[
    list[str] | None,
    typer.Option(
        metavar=_PAIRS,
        help="Once for each party: its file, id, columns (with commas), missing ('refuse' or "
        "'median') and text ('refuse' or 'one-hot'); model, model-args and embedding-size.",
    ),
]
_Parties = Annotated[
    int | None, typer.Option(help="Number of parties. Default: 4, or as many as have named files.")
]
_EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        help="local: in this process; ray: Flower's simulation; supernodes: real nodes, on "
        "this machine; FILE.py:NAME or PACKAGE.MODULE:NAME: one of your own.",
    ),
]
_Out = Annotated[str, typer.Option(metavar="DIR", help="Results folder; else one under runs/.")]


def _examples(lines: str) -> str:
    """An epilog of commands and comments, a line each."""
    shaded = re.sub(r"^#.*", r"[dim]\g<0>[/]", lines.strip(), flags=re.MULTILINE)
    return f"[bold]examples:[/]\n{shaded}".replace("\n", "\n\n")  # else typer joins the lines


_RUN_EXAMPLES = _examples("""
# split learning of four parties on handwritten digits, in this process
vfl run
# asynchronous VAFL on tabular data; results go to runs/a
vfl run -c "strategy='vafl' dataset='breast-cancer' epochs=10" --out runs/a
# the same application on Flower's Ray simulation
vfl run -c "strategy='vafl-t' quorum=2" --engine ray
# two parties with files of their own, whose common rows are found privately
vfl run -c "dataset='files:labels.csv' label='default'" \\
--node-config "file='a.parquet' id='customer'" --node-config "file='b.csv'"
""")

_ALIGN_EXAMPLES = _examples("""
# the customers whom a bank and two parties have in common
vfl align -c "dataset='files:labels.csv' id='customer'" \\
--node-config "file='a.parquet' id='customer'" --node-config "file='b.csv' id='customer'"
""")

_COMPARE_EXAMPLES = _examples("""
# three systems and the baselines
vfl compare split-nn vafl cascaded -c "dataset='breast-cancer' epochs=10"
# one system twice, with keys of its own each time
vfl compare "cascaded party-lr=0.006" "cascaded party-lr=0.02" --target 0.95
""")

_AUDIT_EXAMPLES = _examples("""
# gradient rows name the labels: direct inference is right for every row
vfl audit --strategy vafl
# the same attacks on noisy scalars, in a configuration of your own
vfl audit --strategy dpzv -c "dataset='breast-cancer' epsilon=0.5 delta=1e-3"
""")

_PREDICT_EXAMPLES = _examples("""
# the test rows, by the model of the run in runs/a
vfl predict runs/a
# new people, whose rows are in the files that parties name
vfl predict runs/b -c "dataset='files:new.csv'" --out new-scores.parquet \\
--node-config "file='a.parquet' id='customer'" --node-config "file='b.csv'"
""")

_REPORT_EXAMPLES = _examples("""
# the page about a run, runs/a/report.html
vfl report runs/a
# several runs, and those of a comparison, in the same charts and tables
vfl report runs/a runs/b runs/comparison --out page.html
""")

app = typer.Typer(
    help="Vertical federated learning on Flower.",
    epilog=_RUN_EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    try:
        return int(app(arguments, prog_name="vfl", standalone_mode=False) or 0)
    except click.ClickException as error:  # an unknown option, for one
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
            print("vfl: stopped.", file=sys.stderr)
            raise typer.Exit(130) from error


@app.command("run", cls=_Command, epilog=_RUN_EXAMPLES)
def _run(
    run_config: _RunConfig = None,
    node_config: _NodeConfig = None,
    parties: _Parties = None,
    out: _Out = "",
    engine: _EngineName = "local",
) -> None:
    """Train a system or baseline on this machine."""
    from vfl_flower.figures import headline
    from vfl_flower.holder import checkpoint
    from vfl_flower.holder.results import results_folder
    from vfl_flower.registry import ENGINES
    from vfl_flower.start import Engine

    start: Engine = ENGINES.load(engine)
    keys, node_configs = _keys(run_config, out), _node_configs(node_config)
    config = checkpoint.configured(keys)
    if config.running.resume and keys.get("out"):
        raise ConfigError("A run that is resumed goes on in its own folder: leave out away.")
    earlier = config.running.resume or config.running.grow
    if earlier and parties is None and not node_configs:
        parties = len(checkpoint.load(earlier).strategy["seats"])
    folder = results_folder(config)
    logging.getLogger("flwr.notice").setLevel(logging.INFO)
    is_new = not folder.exists()
    try:
        keys["out"] = str(folder)
        with _ending_on_sigterm():
            finished = start(_number(parties, node_configs), keys, node_configs=node_configs)
        print(headline(finished.summary))
    finally:
        if (is_new or config.running.resume) and (folder / "top.npz").exists():
            print(f"results: {folder}")


@app.command("align", cls=_Command, epilog=_ALIGN_EXAMPLES)
def _align(
    run_config: _RunConfig = None,
    node_config: _NodeConfig = None,
    engine: _EngineName = "local",
) -> None:
    """Find the rows that all have, and keep them for runs and predictions to come.

    Every run does so by itself, if it has not been done for the ids that the
    files have now. Options are those of `vfl run`.
    """
    from vfl_flower.registry import ENGINES
    from vfl_flower.start import Engine

    start: Engine = ENGINES.load(engine)
    node_configs = _node_configs(node_config)
    logging.getLogger("flwr.notice").setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder, _ending_on_sigterm():
        keys = {**_keys(run_config, str(Path(folder, "run"))), "task": "align"}
        summary = start(len(node_configs), keys, node_configs=node_configs).summary
    print(f"{summary['rows']} rows are common to all, by alignment {summary['alignment']}.")


@app.command("compare", cls=_Command, epilog=_COMPARE_EXAMPLES)
def _compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...")],
    run_config: _RunConfig = None,
    node_config: _NodeConfig = None,
    parties: _Parties = None,
    out: _Out = "",
    target: Annotated[float, typer.Option(help="Test accuracy to which bytes are counted.")] = 0.90,
) -> None:
    """Several systems and the baselines on one data set: a table and a picture.

    RUN is a system, or in quotes a system and keys of its own, and before
    them, if you like, a title: "small steps: cascaded party-lr=0.01".

    All run in this process. Beside the systems stand the baselines frozen,
    alone and joined; their curves are drawn in one picture.
    """
    from vfl_flower.tools.compare import compare, table

    common, node_configs = _keys(run_config, out), _node_configs(node_config)
    if "strategy" in common:
        raise ConfigError("`vfl compare` takes its systems as arguments: leave strategy out of -c.")
    own = [_compared(text) for text in runs]
    folder = compare(_number(parties, node_configs), common, own, target, node_configs)
    lines = table(folder, target)
    print(lines)
    if "\njoined " not in lines:
        print("alone and joined are left out: they train by gradients, and black boxes have none.")
    print(f"results: {folder}")


@app.command("audit", cls=_Command, epilog=_AUDIT_EXAMPLES)
def _audit(
    strategy: Annotated[str, typer.Option(help="The system.")],
    run_config: _RunConfig = None,
    parties: _Parties = None,
    out: _Out = "",
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
    from vfl_flower.tools.audit import audit, table

    keys = _keys(run_config, out)
    if keys.get("strategy", strategy) != strategy:
        raise ConfigError(
            f"-c names strategy = {keys['strategy']!r}, and --strategy {strategy}: leave one out."
        )
    findings, claim, folder = audit(_number(parties), {**keys, "strategy": strategy}, known)
    print(table(findings, claim))
    print(f"results: {folder}")


@app.command("predict", cls=_Command, epilog=_PREDICT_EXAMPLES)
def _predict(
    model: Annotated[str, typer.Argument(metavar="RUN")],
    run_config: _RunConfig = None,
    node_config: _NodeConfig = None,
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
    from vfl_flower.start import predict_local

    keys = {**_keys(run_config, out), "model": model}
    keys |= {"without": without} if without else {}
    logging.getLogger("flwr.notice").setLevel(logging.INFO)
    print(f"predictions: {predict_local(keys, _node_configs(node_config))}")


@app.command("report", cls=_Command, epilog=_REPORT_EXAMPLES)
def _report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    out: Annotated[Path | None, typer.Option(help="Default: report.html in the first RUN.")] = None,
) -> None:
    """One HTML page about runs, comparisons and audits.

    RUN is the results folder of one of them. The page shows what runs reached
    and what they took, curves, bytes and delays by party, privacy, attacks
    and settings. It is one file that loads nothing; an earlier report is
    replaced.
    """
    from vfl_flower.files import write_whole
    from vfl_flower.tools.report import report

    folders = [each.expanduser() for each in runs]
    page = out.expanduser() if out else folders[0] / "report.html"
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
    from vfl_flower.holder.contribution import contribution, table

    print(table(contribution(run.expanduser(), metric)))


@app.command("list", cls=_Command)
def _list() -> None:
    """Systems, baselines and every configuration key."""
    from vfl_flower.tools import listing

    listing.show()


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Have SIGTERM end this process so that Flower's processes end too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _keys(run_config: list[str] | None, out: str) -> dict[str, Any]:
    """The run configuration that -c and --out give."""
    return {**pairs(run_config or [], "-c"), **({"out": out} if out else {})}


def _node_configs(texts: list[str] | None) -> list[dict[str, Any]]:
    return [pairs([text], "--node-config") for text in texts or []]


def _number(parties: int | None, node_configs: Sequence[Any] = ()) -> int:
    """How many parties run: as many as is said, have named a file, or four."""
    return len(node_configs) or 4 if parties is None else parties


def _compared(text: str) -> dict[str, Any]:
    """A RUN of `vfl compare`: perhaps a title, a system, and keys of its own."""
    from vfl_flower.registry import SYSTEMS

    title, _, rest = text.partition(": ")
    titled = bool(rest.strip()) and ("=" not in title or rest.split()[0] in SYSTEMS.names)
    name, *keys = (rest if titled else text).split(None, 1) or [""]
    if not name or (titled and not title):
        raise ConfigError("A run of `vfl compare` is empty: name a system, then its own keys.")
    own = pairs(keys, "RUN")
    if {"strategy", "out"} & own.keys():
        raise ConfigError(f"{text!r} names a strategy or out twice: write the system first.")
    return {"strategy": name, **own, **({"title": title} if titled else {})}


if __name__ == "__main__":
    sys.exit(main())
