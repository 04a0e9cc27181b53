"""The `vfl` command."""

from __future__ import annotations

import argparse
import logging
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any

_PAIR = re.compile(r"""[\w.-]+=('[^']*'|"[^"]*"|\S+)""")  # key=value, as Flower reads it

_EXAMPLES = """\
examples:
  vfl run
      split learning of four parties on handwritten digits, in this process
  vfl run -c "strategy='vafl' dataset='breast-cancer' epochs=10" --parties 3 --out runs/a
      asynchronous VAFL on tabular data; results go to runs/a
  vfl run -c "strategy='vafl-t' quorum=2" --engine ray
      the same application on Flower's Ray simulation
  vfl run -c "dataset='files:labels.csv' label='default'" \\
      --node-config "file='a.parquet' id='customer'" --node-config "file='b.csv'"
      two parties with files of their own, whose common rows are found privately
  vfl list
      systems, baselines, and every configuration key
"""


_PREDICT_EXAMPLES = """\
examples:
  vfl predict runs/a
      the test rows, by the model of the run in runs/a
  vfl predict runs/b -c "dataset='files:new.csv'" --out new-scores.parquet \\
      --node-config "file='a.parquet' id='customer'" --node-config "file='b.csv'"
      new people, whose rows are in the files that parties name
"""


_COMPARE_EXAMPLES = """\
examples:
  vfl compare split-nn vafl cascaded -c "dataset='breast-cancer' epochs=10"
      three systems and the three baselines
  vfl compare vafl "cascaded party-lr=0.006" "cascaded party-lr=0.02" --target 0.95
      one system twice, with keys of its own each time
"""


_AUDIT_EXAMPLES = """\
examples:
  vfl audit --strategy vafl
      gradient rows name the labels: direct inference is right for every row
  vfl audit --strategy dpzv -c "dataset='breast-cancer' epochs=10 epsilon=0.5 delta=1e-3"
      the same attacks on noisy scalars, in a configuration of your own

A success near its guessing says that this attack found nothing, not that none would. Attacks
marked * are on one epoch of two parties whose embeddings the server sums, which is the setting of
Table I of the Cascaded paper; the others are on the run as configured.
"""


_REPORT_EXAMPLES = """\
examples:
  vfl report runs/a
      the page about a run, runs/a/report.html
  vfl report runs/a runs/b runs/comparison --out page.html
      several runs, and those of a comparison, in the same charts and tables
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run, and turn an error into one sentence and an exit code."""
    parser = argparse.ArgumentParser(
        prog="vfl",
        description="Vertical federated learning on Flower.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run_parser = commands.add_parser(
        "run",
        help="train a system or baseline on this machine",
        description="Train a system or baseline on this machine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_common(run_parser)
    _add_node_config(run_parser)
    run_parser.add_argument(
        "--engine",
        choices=("local", "ray", "supernodes"),
        default="local",
        help="local: in this process (default); ray: Flower's simulation; supernodes: real nodes, "
        "on this machine",
    )
    compare_parser = commands.add_parser(
        "compare",
        help="several systems and the three baselines on one data set: a table and a picture",
        description="Run systems and, beside them, the baselines frozen, alone and joined, in this "
        "process; print a table, and draw their curves in one picture.",
        epilog=_COMPARE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compare_parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a system, or in quotes a system and keys of its own, and before them, if you like, a "
        'title: "small steps: cascaded party-lr=0.01"',
    )
    _add_common(compare_parser)
    _add_node_config(compare_parser)
    compare_parser.add_argument(
        "--target",
        type=float,
        default=0.90,
        metavar="ACCURACY",
        help="test accuracy to which bytes are counted (default: %(default)s)",
    )
    audit_parser = commands.add_parser(
        "audit",
        help="attack a system by what its messages carry, and tell how often that succeeds",
        description="Run published attacks on a system, in this process: inference of labels by a "
        "party or an eavesdropper, and of features by the label holder. They use the messages of "
        "party 0. Beside each success is that of guessing.",
        epilog=_AUDIT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    audit_parser.add_argument("--strategy", required=True, metavar="NAME", help="the system")
    _add_common(audit_parser)
    audit_parser.add_argument(
        "--known",
        type=int,
        default=4,
        metavar="K",
        help="labelled rows a class that some attackers have (default: %(default)s)",
    )
    predict_parser = commands.add_parser(
        "predict",
        help="predict by the model of a run",
        description="Predict by the model of a run whose parties' states lie in its folder, as "
        "runs on this machine leave them: the test rows, or rows of new files.",
        epilog=_PREDICT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    predict_parser.add_argument("model", metavar="RUN", help="results folder of the run")
    predict_parser.add_argument(
        "-c",
        "--run-config",
        action="append",
        default=[],
        metavar='"KEY=VALUE ..."',
        help="with files: \"dataset='files:new.csv'\", and what differs from training",
    )
    predict_parser.add_argument(
        "--out", metavar="FILE", help="a .csv or .parquet (default: RUN/predictions.csv)"
    )
    _add_node_config(predict_parser)
    report_parser = commands.add_parser(
        "report",
        help="one HTML page about runs, comparisons and audits",
        description="Write a page about results folders: what runs reached and what they took, "
        "curves, bytes and delays by party, privacy, attacks and settings. It is one file that "
        "loads nothing; an earlier report is replaced.",
        epilog=_REPORT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report_parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="results folder of a run, comparison or audit"
    )
    report_parser.add_argument(
        "--out", metavar="FILE", help="the page (default: report.html in the first RUN)"
    )
    commands.add_parser("list", help="print systems, baselines and every configuration key")
    options = parser.parse_args(arguments)

    import flwr.app  # noqa: F401  (after parsing, so that --help is immediate; sets up its logger)

    from vfl_flower.errors import VflError

    logging.getLogger("flwr").setLevel(logging.WARNING)
    try:
        if options.command == "list":
            print(_listing())
        elif options.command == "compare":
            _compare(options)
        elif options.command == "audit":
            _audit(options)
        elif options.command == "predict":
            _predict(options)
        elif options.command == "report":
            _report(options)
        else:
            _run(options)
    except VflError as error:
        print(f"vfl: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # as by `vfl list | head`
        sys.stderr.close()
    except KeyboardInterrupt:
        print("vfl: stopped.", file=sys.stderr)
        return 130
    return 0


def _add_common(parser: argparse.ArgumentParser) -> None:
    """What every command that trains takes."""
    parser.add_argument(
        "-c",
        "--run-config",
        action="append",
        default=[],
        metavar='"KEY=VALUE ..."',
        help="configuration, as for `flwr run`; texts in quotes. `vfl list` names the keys",
    )
    parser.add_argument(
        "--parties",
        type=int,
        metavar="M",
        help="number of parties (default: 4; with files, as many as have named one)",
    )
    parser.add_argument("--out", metavar="DIR", help="results folder (default: under runs/)")


def _add_node_config(parser: argparse.ArgumentParser) -> None:
    """What parties with files of their own say of them."""
    parser.add_argument(
        "--node-config",
        action="append",
        default=[],
        metavar='"KEY=VALUE ..."',
        help="once for each party: its file, id, columns (with commas), missing ('refuse' or "
        "'median') and text ('refuse' or 'one-hot')",
    )


def _predict(options: argparse.Namespace) -> None:
    from vfl_flower.start import predict_local

    run_config = {**_parse(options.run_config), "model": options.model}
    if options.out:
        run_config["out"] = options.out
    logging.getLogger("flwr.notice").setLevel(logging.INFO)
    path = predict_local(run_config, [_parse([text]) for text in options.node_config])
    print(f"predictions: {path}")


def _compare(options: argparse.Namespace) -> None:
    from vfl_flower.errors import ConfigError
    from vfl_flower.registry import SYSTEMS
    from vfl_flower.tools.compare import compare, table

    common = _parse(options.run_config)
    if "strategy" in common:
        raise ConfigError("`vfl compare` takes its systems as arguments: leave strategy out of -c.")
    if options.out:
        common["out"] = options.out
    runs = []
    for text in options.runs:
        title, _, rest = text.partition(": ")
        titled = bool(rest.strip()) and ("=" not in title or rest.split()[0] in SYSTEMS.names)
        name, *keys = (rest if titled else text).split(None, 1) or [""]
        if not name or (titled and not title):
            raise ConfigError("A run of `vfl compare` is empty: name a system, then its own keys.")
        own = _parse(keys)
        if {"strategy", "out"} & own.keys():
            raise ConfigError(f"{text!r} names a strategy or out twice: write the system first.")
        runs.append({"strategy": name, **own, **({"title": title} if titled else {})})
    node_configs = [_parse([text]) for text in options.node_config]
    parties = options.parties or len(node_configs) or 4
    folder = compare(parties, common, runs, options.target, node_configs)
    lines = table(folder, options.target)
    print(lines)
    if "\njoined " not in lines:
        print("alone and joined are left out: they train by gradients, and black boxes have none.")
    print(f"results: {folder}")


def _audit(options: argparse.Namespace) -> None:
    from vfl_flower.errors import ConfigError
    from vfl_flower.tools.audit import audit, table

    run_config = _parse(options.run_config)
    if run_config.get("strategy", options.strategy) != options.strategy:
        raise ConfigError(
            f"-c names strategy = {run_config['strategy']!r}, and --strategy {options.strategy}: "
            "leave one out."
        )
    run_config["strategy"] = options.strategy
    if options.out:
        run_config["out"] = options.out
    findings, folder = audit(options.parties or 4, run_config, options.known)
    print(table(findings))
    print(f"results: {folder}")


def _report(options: argparse.Namespace) -> None:
    from pathlib import Path

    from vfl_flower.errors import VflError
    from vfl_flower.tools.report import report

    folders = [Path(each).expanduser() for each in options.runs]
    out = Path(options.out).expanduser() if options.out else folders[0] / "report.html"
    if out.suffix != ".html":
        raise VflError(f"{out} would be a page: let --out end in .html.")
    page = report(folders)
    try:
        out.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    except OSError as error:
        raise VflError(f"{out} cannot be written: name another file by --out.") from error
    print(f"report: {out}")


def _run(options: argparse.Namespace) -> None:
    from vfl_flower.errors import ConfigError
    from vfl_flower.holder import checkpoint
    from vfl_flower.holder.results import headline, results_folder
    from vfl_flower.registry import ENGINES
    from vfl_flower.systems import resolve

    run_config = _parse(options.run_config)
    if options.out:
        run_config["out"] = options.out
    config = resolve(run_config)
    if config.running.resume and config.running.out:
        raise ConfigError("A run that is resumed goes on in its own folder: leave out away.")
    folder = results_folder(config)
    node_configs = [_parse([text]) for text in options.node_config]
    parties = options.parties
    if parties is None:
        parties = len(node_configs) or 4
    if config.running.resume and options.parties is None:
        parties = len(checkpoint.load(config.running.resume).strategy["seats"])
    logging.getLogger("flwr.notice").setLevel(logging.INFO)
    # So that Flower's processes end too.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    is_new = not folder.exists()
    try:
        finished = ENGINES.load(options.engine)(
            parties, {**run_config, "out": str(folder)}, node_configs=node_configs
        )
        print(headline(finished.summary))
    finally:
        signal.signal(signal.SIGTERM, before)
        if (is_new or config.running.resume) and (folder / "top.npz").exists():
            print(f"results: {folder}")


def _parse(texts: list[str]) -> dict[str, Any]:
    """Key-value pairs, in Flower's own syntax."""
    from click import ClickException
    from flwr.common.config import parse_config_args

    from vfl_flower.errors import ConfigError

    try:
        left = [] if texts[:1] and texts[0].endswith(".toml") else texts
        if any(_PAIR.sub("", text).strip() for text in left):
            raise ValueError  # Flower would pass over what it does not recognise
        return dict(parse_config_args(texts))
    except (ClickException, OSError, ValueError) as error:
        raise ConfigError(
            f"-c {' '.join(texts)!r} cannot be read: write key=value pairs with spaces between "
            "them, and texts in quotes, as in -c \"strategy='vafl' epochs=5\"."
        ) from error


def _listing() -> str:
    from vfl_flower.config import KEYS
    from vfl_flower.registry import SYSTEMS

    lines = ["Systems and baselines (strategy = '...')", ""]
    for name, system in ((name, SYSTEMS.load(name)) for name in SYSTEMS.names):
        lines += [f"  {name:<10} {system.about}", f"  {'':<10} {system.axes}"]
        own = [f"{name}={value!r}" for name, value in system.defaults.items()]
        lines += [f"  {'':<10} defaults of its own: {' '.join(own)}"] if own else []
    lines += ["", "Configuration keys, with defaults", ""]
    for key, spec in KEYS.items():
        default = repr(spec.default) if spec.default is not None else "auto"
        lines.append(f"  {key} = {default}")
        text = spec.help
        if spec.names and key != "strategy":
            text += f" ({', '.join(spec.names)})"
        if spec.auto:
            text += f"; auto: {spec.auto}"
        lines.append(f"      {text}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
