"""The `vfl` command."""

import logging
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from vfl_flower.config import logs
from vfl_flower.config.errors import (
    ConfigError,
    Interrupted,
    Terminated,
    VflError,
    terminating,
    why,
)
from vfl_flower.tools import operate, options
from vfl_flower.tools.command import Command, LightCommand, NotifyingCommand, shown_usage

app = typer.Typer(
    help="Vertical federated learning on Flower.",
    epilog=options.RUN_EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


_PLAIN = "_TYPER_FORCE_DISABLE_TERMINAL"  # typer reads it when it first shows help


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    if os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        os.environ[_PLAIN] = "1"  # else NO_COLOR and the files of CI get escape codes
    try:
        return int(app(arguments, prog_name="vfl", standalone_mode=False) or 0)
    except click.ClickException as error:  # such as an unknown option
        return shown_usage(error)
    finally:
        os.environ.pop(_PLAIN, None)


@app.callback()
def _of_all(told: options.Version = False) -> None: ...


@app.command("demo", cls=Command)
def _demo(engine: options.EngineName = "local") -> None:
    """Train on handwritten digits with four parties, and write a report.

    Each party has a quarter of every image. The label holder has the labels.
    The results folder is a new one in runs/. It holds the report.
    """
    from vfl_flower.label_holder.results import results_folder
    from vfl_flower.protocol.systems import resolve
    from vfl_flower.results.report import write_report

    folder = results_folder(resolve({}))
    _run(engine=engine, parties=4, out=str(folder))
    print(f"report: {write_report([folder])}")


@app.command("run", cls=Command, epilog=options.BASIC + options.RUN_EXAMPLES)
def _run(
    system: options.System = "",
    run_config: options.RunConfig = None,
    node_config: options.NodeConfig = None,
    parties: options.Parties = None,
    out: options.Out = "",
    engine: options.EngineName = "local",
    seeds: options.Seeds = 1,
    quiet: options.Quiet = False,
) -> None:
    """Train a system or baseline on this machine.

    SYSTEM is short for -c "strategy='SYSTEM'". Progress is one line on a
    terminal. Elsewhere it is one line per epoch.
    """
    from vfl_flower.config.plugins import ENGINES
    from vfl_flower.data.survey import surveyed
    from vfl_flower.label_holder import checkpoint, earlier_run
    from vfl_flower.label_holder.progress import shown
    from vfl_flower.label_holder.results import results_folder
    from vfl_flower.launch.submission import touched
    from vfl_flower.results.figures import headline
    from vfl_flower.results.terminal import wrapped
    from vfl_flower.tools.seeds import repeated, table

    start = ENGINES.load(engine)
    number, keys, node_configs = options.given(run_config, node_config, parties, out)
    options.name_system(keys, system)
    config = earlier_run.configured(keys)
    if config.task != "train":
        raise ConfigError(
            f"task = {config.task!r} is no training. Leave task out, or use `vfl {config.task}`."
        )
    if config.running.resume and keys.get("out"):
        raise ConfigError(
            "A resumed run continues in its own folder: leave out --out and the option out."
        )
    earlier = config.running.resume or config.running.grow or config.running.rerun
    if earlier and parties is None and not node_configs:
        number = checkpoint.load(earlier).parties
    folder, named = results_folder(config), bool(keys.get("out"))
    keys["out"] = str(folder)
    logs.notice.setLevel(logging.WARNING if quiet else logging.INFO)
    model = folder / ("top.npz" if seeds == 1 else "summary.json")
    before, is_new = touched(model), not any(folder.glob("*"))
    try:
        format_of_records = logs.described(config.running.log_format)
        of_tables = surveyed(config, node_configs)
        with terminating(), shown(not quiet), format_of_records, of_tables:
            finished = repeated(start, number, keys, node_configs, seeds)
        print(wrapped(*headline(finished.summary).splitlines()))
        if seeds > 1:
            print(table(finished.folder))
    except (KeyboardInterrupt, Terminated) as error:  # a run on nodes keeps no new checkpoint
        if getattr(error, "folder", "") or not (folder / checkpoint.FILE).exists():
            raise
        if isinstance(error, Terminated):
            raise Terminated(error.number, error.sentence, str(folder)) from error
        raise Interrupted(why(error), str(folder)) from error
    except VflError:
        if config.running.rerun and is_new:  # a part of a rerun is of no use
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if touched(model) != before:
            print(f"results: {folder}")
        elif not named:
            with suppress(OSError):  # the run did not begin, and has left its folder empty
                folder.rmdir()


@app.command("rerun", cls=Command, epilog=options.RERUN_EXAMPLES)
def _rerun(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    node_config: options.NodeConfig = None,
    out: options.Out = "",
    engine: options.EngineName = "local",
    quiet: options.Quiet = False,
) -> None:
    """Repeat a finished run to the last bit, and compare all messages.

    RUN is the results folder of the run. Each side draws from its own secrets
    of that run, and sends nothing that it has not sent then. So a rerun costs no
    epsilon. It ends at the first difference, and names it.
    """
    keys = [f'expert="rerun={shlex.quote(run)}"']
    _run(run_config=keys, node_config=node_config, out=out, engine=engine, quiet=quiet)


@app.command("align", cls=NotifyingCommand, epilog=options.ALIGN_EXAMPLES)
def _align(
    run_config: options.RunConfig = None,
    node_config: options.NodeConfig = None,
    engine: options.EngineName = "local",
) -> None:
    """Find the rows that all parties have, and keep them for later use.

    A run aligns by itself if the ids in the files have not been aligned before.
    It takes the options of `vfl run`.
    """
    from vfl_flower.config.plugins import ENGINES

    start = ENGINES.load(engine)
    with tempfile.TemporaryDirectory() as folder, terminating():
        out = str(Path(folder, "run"))
        _, keys, node_configs = options.given(run_config, node_config, out=out)
        keys["task"] = "align"
        summary = start(len(node_configs), keys, node_configs=node_configs).summary
    what = "are used" if summary["config"]["align"] == "any" else "are common to all"
    if engine != "local" and (rules := summary["coverage"].get("rules")):  # else the run says so
        from vfl_flower.alignment.rule_figures import tables_of

        print(*tables_of(rules), sep="\n")
    print(f"{summary['rows']} rows {what}, by alignment {summary['alignment']}.")


app.command("information", cls=NotifyingCommand, epilog=options.INFORMATION_EXAMPLES)(
    operate.information
)


@app.command("compare", cls=Command, epilog=options.COMPARE_EXAMPLES)
def _compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...")],
    run_config: options.RunConfig = None,
    node_config: options.NodeConfig = None,
    parties: options.Parties = None,
    out: options.Out = "",
    target: options.Target = 0.90,
    seeds: options.Seeds = 1,
    quiet: options.Quiet = False,
) -> None:
    """Compare systems and the baselines on one data set, in a table.

    RUN is a system, or in quotes a system and its own options. A title may
    precede them: "small steps: cascaded party-lr=0.01".

    All runs are in this process. The baselines frozen, local-only and
    centralised stand beside the systems. `vfl report` draws the curves.

    The first model is tested against the others on the same people, and against
    logistic regression and boosting on the label holder's columns. If each RUN
    is the results folder of a finished run, these tests alone take place.
    """
    from vfl_flower.label_holder.progress import shown
    from vfl_flower.results.report.read import read
    from vfl_flower.results.report.sections import differences
    from vfl_flower.tasks.inference.paired import paired
    from vfl_flower.tools.compare import compare, compared, table

    folders = [Path(each).expanduser() for each in runs]
    if all((each / "summary.json").is_file() for each in folders):
        if run_config or node_config or out or seeds > 1:
            raise ConfigError("Finished runs keep their options: name nothing but their folders.")
        paired(folders)
        if found := differences(read(folders[:1])):
            print(found.in_terminal())
        return
    number, common, node_configs = options.given(run_config, node_config, parties, out)
    if "strategy" in common:
        raise ConfigError("`vfl compare` takes its systems as arguments: leave strategy out of -c.")
    own = [compared(text) for text in runs]
    with shown(not quiet):
        folder = compare(number, common, own, target, node_configs, seeds)
    print(table(folder))
    if not (folder / "centralised").exists():
        print("local-only and centralised are left out: they need gradients of the bottom models.")
    print(f"results: {folder}")


@app.command("sweep", cls=Command, epilog=options.SWEEP_EXAMPLES)
def _sweep(
    system: Annotated[str, typer.Argument(metavar="SYSTEM")],
    search: options.Search,
    trials: options.Trials = 40,
    run_config: options.RunConfig = None,
    node_config: options.NodeConfig = None,
    parties: options.Parties = None,
    seeds: options.Seeds = 1,
    jobs: options.Jobs = 0,
    out: options.Out = "",
    quiet: options.Quiet = False,
) -> None:
    """Search the options of a system that do best on the validation rows.

    Trials run side by side. A trial whose curve falls behind is stopped early.
    The same command continues a sweep that was interrupted.
    """
    from vfl_flower.label_holder.progress import shown
    from vfl_flower.tools.sweep import sweep, table

    number, keys, node_configs = options.given(run_config, node_config, parties, out)
    if "strategy" in keys:
        raise ConfigError("`vfl sweep` takes its system as argument: leave strategy out of -c.")
    keys = {"strategy": system, **keys}
    with terminating(), shown(not quiet):
        folder = sweep(number, keys, search, trials, node_configs, seeds, jobs)
    print(table(folder))
    print(f"results: {folder}")


@app.command("predict", cls=NotifyingCommand, epilog=options.PREDICT_EXAMPLES)
def _predict(
    model: Annotated[str, typer.Argument(metavar="RUN")],
    run_config: options.RunConfig = None,
    node_config: options.NodeConfig = None,
    out: options.PredictionsFile = "",
    without: options.Without = "",
    explain: options.Explain = False,
) -> None:
    """Predict the test rows, or the rows of new files, with the model of a run.

    RUN is the results folder of the run. It holds the parties' states if the
    run was on this machine. With new files, -c names the label holder's file,
    and the options that differ from training.
    """
    from vfl_flower.launch.engines import predict_local

    _, keys, node_configs = options.given(run_config, node_config, out=out)
    keys |= {"model": model, **({"without": without} if without else {})}
    keys |= {"explain": True} if explain else {}
    print(f"predictions: {predict_local(keys, node_configs)}")


@app.command("audit", cls=Command, epilog=options.AUDIT_EXAMPLES)
def _audit(
    strategy: Annotated[str, typer.Option(metavar="SYSTEM", help="The system to attack.")],
    attacks: Annotated[list[str] | None, typer.Argument(metavar="[ATTACK...]")] = None,
    run_config: options.RunConfig = None,
    node_config: options.NodeConfig = None,
    parties: options.Parties = None,
    out: options.Out = "",
    known: options.Known = 4,
) -> None:
    """Run published attacks against a system's messages, and print their success.

    A party or an eavesdropper infers labels, and the label holder infers
    features. All attacks run in this process, on the messages of party 0.
    Beside each success stands guessing. A success near guessing says that
    this attack found nothing, not that none would.

    Attacks marked * are on one epoch of two parties whose embeddings the
    server sums, as in Table I of the Cascaded paper. The others are on the
    run as configured. If the run claims an epsilon, a game with canaries
    tries to refute it: the epsilon that it shows must not exceed the claim.

    If rules match people (match), each side guesses keys of people that only
    the other side has. Name the file of party 0 by --node-config.

    ATTACK names attacks of a hostile party 0, which wants rows to get the rarest
    class: backdoor, replaced, triggerless, adaptive, widening, dominating,
    free-rider, or hostile for all. Three seeds give success and accuracy. Beside
    them stand the figures of an honest party 0.
    """
    from vfl_attacks.audit import audit
    from vfl_attacks.robustness import robustness
    from vfl_flower.results.report.read import read
    from vfl_flower.results.report.sections import audits

    number, keys, nodes = options.given(run_config, node_config, parties, out)
    options.name_system(keys, strategy)
    if attacks:
        _, folder = robustness(number, keys, attacks, known)
    else:
        _, _, folder = audit(number, keys, known, node_configs=nodes)
    if found := audits(read([folder])):
        print(found.in_terminal())
    print(f"results: {folder}")


@app.command("list", cls=LightCommand, epilog=options.LIST_EXAMPLES)
def _list(
    words: Annotated[list[str] | None, typer.Argument(metavar="[NAME|WORD...]")] = None,
    every: options.Every = False,
) -> None:
    """List systems, baselines and basic options; explain or search them.

    With the NAME of a system, an option or a party rule, print all about it.
    With other words, print every entry whose name or help text has them.
    """
    from vfl_flower.tools import listing

    listing.show(words or (), every)


app.add_typer(operate.app)
app.add_typer(operate.audit_log, name="audit-log")

_GROUPS = {
    "Train": "demo run rerun align information compare sweep list",
    "Use a model": "predict distil serve",
    "Judge a model": "report evaluate explain contribution audit",
    "Operate": "doctor forget audit-log",
}
"""Groups of `vfl --help`, by what a user does."""

_each: Any
for _each in (*app.registered_commands, *operate.app.registered_commands, *app.registered_groups):
    for _title, _names in _GROUPS.items():
        if _each.name in _names.split():
            _each.rich_help_panel = _title


if __name__ == "__main__":
    sys.exit(main())
