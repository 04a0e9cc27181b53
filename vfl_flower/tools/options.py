"""Options that commands share, what they give, and the examples of each command."""

import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import GROUPS, KEYS, opened, packed, pairs

_PAIRS = '"OPTION=VALUE ..."'


def _tell_version(wanted: bool) -> None:
    if wanted:
        print(f"vfl-flower {version('vfl-flower')}, flwr {version('flwr')}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version."),
]
System = Annotated[
    str,
    typer.Argument(metavar="[SYSTEM]", show_default=False, help="System or baseline (`vfl list`)."),
]
RunConfig = Annotated[
    list[str] | None,
    typer.Option(
        *("-c", "--run-config"),
        metavar=_PAIRS,
        help="Options of the run, as for `flwr run`; texts in quotes. `vfl list` describes them.",
    ),
]
NodeConfig = Annotated[
    list[str] | None,
    typer.Option(
        metavar=_PAIRS,
        help="Node configuration of one party; repeat it for each party. It names the party's data "
        "(file or images, id, columns), its model and its rules (`vfl list`).",
    ),
]
Parties = Annotated[
    int | None,
    typer.Option(metavar="N", help="Number of parties. Default: one per --node-config, or 4."),
]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        help="local: in this process; ray: Flower's simulation; supernodes: real nodes on "
        "this machine; FILE.py:NAME or PACKAGE.MODULE:NAME: your own engine.",
    ),
]
Out = Annotated[
    str, typer.Option(metavar="DIR", help="Results folder. Default: a new folder in runs/.")
]
IdFile = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="The people's ids, one a line. Without ids: a .csv file with the columns of "
        "match-columns, by their names in rules and in that order.",
    ),
]
Seeds = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Repeat each run with this many seeds, and report means and standard deviations.",
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show the result only, without progress.")
]

ServeEngine = Annotated[
    str,
    typer.Option(
        "--engine", metavar="ENGINE", help="local: in this process; supernodes: real nodes here."
    ),
]

# --- of one command -----------------------------------------------------------------------------

Target = Annotated[float, typer.Option(metavar="X", help="Count bytes until this accuracy.")]
Search = Annotated[
    list[str],
    typer.Option(
        metavar='"OPTION=... ..."',
        help="Options, and what to search of each: a..b, a..b:log, or choices x|y|z.",
    ),
]
Trials = Annotated[
    int, typer.Option(min=1, metavar="N", help="Trials, including an earlier call's.")
]
Jobs = Annotated[
    int,
    typer.Option(
        min=0, metavar="N", show_default=False, help="Trials at a time. Default: one per core."
    ),
]
Known = Annotated[
    int, typer.Option(metavar="N", help="Labelled rows per class that some attackers know.")
]
PredictionsFile = Annotated[
    str, typer.Option("--out", metavar="FILE", help=".csv or .parquet. Default: in RUN.")
]
LabelsFile = Annotated[
    str, typer.Option("--labels", metavar="FILE", help="Outcomes by id: .csv or .parquet.")
]
KeptPredictions = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Of `vfl predict`. Default: predictions.csv in RUN."),
]
Without = Annotated[str, typer.Option(metavar="PARTIES", help="Parties to leave out, such as 0,3.")]
Explain = Annotated[bool, typer.Option("--explain", help="Also write reasons for each score.")]
Repeats = Annotated[
    int, typer.Option(min=1, metavar="N", help="Permutations of each feature. More are surer.")
]
Page = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Default: report.html in RUN, or above several."),
]
Metric = Annotated[
    str,
    typer.Option(
        metavar="METRIC", help="accuracy, auc, log-loss (its fall) or r2. Default: by the labels."
    ),
]
SuperLink = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Also check the SuperLink, as parties reach it.")
]
StreamPorts = Annotated[
    str, typer.Option(metavar="PORTS", help="The option stream-ports, if no run is named.")
]
Compare = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Output of --json at another organisation, to compare."),
]
Noted = Annotated[
    str,
    typer.Option(
        metavar="DIGEST", help="A digest that `verify` printed earlier. A line must still have it."
    ),
]
After = Annotated[
    str,
    typer.Option(
        metavar="DIGEST",
        help="The last digest of the file before the first one, if nobody keeps that file.",
    ),
]
Every = Annotated[
    bool, typer.Option("--all", help="List every option and party rule, not only basic ones.")
]


def given(
    run_config: list[str] | None,
    node_config: list[str] | None,
    parties: int | None = None,
    out: str = "",
) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Return the number of parties, the run configuration and the node configurations."""
    keys: dict[str, Any] = {}
    for text in run_config or []:
        keys |= of_user(pairs([text], "-c"))
    keys |= {"out": out} if out else {}
    nodes = [pairs([text], "--node-config") for text in node_config or []]
    return len(nodes) or 4 if parties is None else parties, keys, nodes


def of_user(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a user wrote, with the settings of ``expert`` beside them."""
    for name, value in keys.items():
        if name in KEYS and KEYS[name].expert:
            raise ConfigError(
                f"{name} is an expert setting, not an option: write "
                f"expert='{packed({name: value})['expert']}'. `vfl list expert` names all."
            )
    return opened(keys)


def name_system(keys: dict[str, Any], system: str) -> None:
    """Set the option ``strategy`` to the system that a command names, unless -c names another."""
    if "=" in system:
        raise ConfigError(
            f"{system!r} stands outside of -c. Write all options in one pair of quotes, with texts "
            "in quotes too, as in -c \"OPTION='text' OTHER=5\"."
        )
    if system.endswith(".toml"):
        raise ConfigError(f"{system!r} is a file of options: name it after -c, as in -c {system}.")
    if system and keys.setdefault("strategy", system) != system:
        raise ConfigError(
            f"-c names strategy = {keys['strategy']!r}, and the command {system}: leave one out."
        )


def _examples(lines: str) -> str:
    shaded = re.sub(r"^#.*", r"[dim]\g<0>[/]", lines.strip(), flags=re.MULTILINE)
    return f"[bold]examples:[/]\n{shaded}".replace("\n", "\n\n")  # else typer joins the lines


def _basic() -> str:
    names: dict[str, list[str]] = {}
    for each in KEYS.values():
        if each.basic:
            names.setdefault(GROUPS[each.section], []).append(each.name)
    lines = (f"{title}: {' '.join(rest)}" for title, rest in names.items())
    about = "`vfl list` explains them. `vfl list --all` shows the rest."
    return "\n\n".join(("[bold]basic options for -c:[/]", *lines, about, ""))


BASIC = _basic()

RUN_EXAMPLES = _examples("""
# split learning of four parties on handwritten digits, in this process
vfl run
# asynchronous VAFL on tabular data; results go to runs/a
vfl run vafl -c "dataset='breast-cancer' epochs=10" --out runs/a
# the same application on Flower's Ray simulation
vfl run -c "strategy='vafl-t' quorum=2" --engine ray
# two parties with their own files; their common rows are found privately
vfl run -c "dataset='files:labels.csv' label='default'" \\
--node-config "file='a.parquet' id='customer'" --node-config "file='b.csv'"
""")

RERUN_EXAMPLES = _examples("""
# the finished run in runs/a again; its figures and messages are equal to the last bit
vfl rerun runs/a
# a run of two parties with files, and the results in runs/b
vfl rerun runs/a --out runs/b \\
--node-config "file='a.parquet' id='customer'" --node-config "file='b.csv' id='customer'"
""")

ALIGN_EXAMPLES = _examples("""
# the customers that a bank and two parties have in common
vfl align -c "dataset='files:labels.csv' id='customer'" \\
--node-config "file='a.parquet' id='customer'" --node-config "file='b.csv' id='customer'"
""")

INFORMATION_EXAMPLES = _examples("""
# by labels with noise of epsilon 1, which all parties get
vfl information -c "dataset='files:labels.csv' label='default'" \\
--node-config "file='a.parquet' id='customer'" --node-config "file='b.csv'"
# figures of a run by groups of a party's column
vfl information runs/a --node-config "file='a.parquet' segments='sex'" --node-config "file='b.csv'"
# exact counts: the label holder gets the bin of each row, and parties get counts of labels
vfl information -c "dataset='breast-cancer' information='exact'"
""")

FORGET_EXAMPLES = _examples("""
# the label holder: what its runs hold of people who have withdrawn; then remove it
vfl forget --id-file withdrawn.txt runs --dry-run
vfl forget --id-file withdrawn.txt runs
# a party, which keeps its states in /srv/vfl/states
vfl forget --id-file withdrawn.txt /srv/vfl/states
""")

DOCTOR_EXAMPLES = _examples("""
# this machine
vfl doctor
# a party: its keys, its states, and the way to the label holder
vfl doctor /srv/vfl --superlink vfl.bank.example:8000
# a label holder, and whether its run can be resumed and can predict
vfl doctor /srv/vfl /data/runs/1
# compare versions and protocol with what another organisation has sent
vfl doctor --compare party-0.json
""")

LIST_EXAMPLES = _examples("""
# the systems and the basic options
vfl list
# all about one option, and about one system
vfl list batch-size
vfl list vafl
# everything about noise
vfl list noise
""")

COMPARE_EXAMPLES = _examples("""
# three systems and the baselines
vfl compare split-nn vafl cascaded -c "dataset='breast-cancer' epochs=10"
# one system twice, each time with its own options
vfl compare "cascaded party-lr=0.006" "cascaded party-lr=0.02" --target 0.95
""")

SWEEP_EXAMPLES = _examples("""
# the parties' learning rate and the window of split learning, 40 trials
vfl sweep split-nn --search "party-lr=1e-3..1:log window=1|8|64"
# the share of numbers that a message keeps; the mean of three seeds counts
vfl sweep ef-vfl --search "keep=0.01..1:log" --seeds 3
""")

AUDIT_EXAMPLES = _examples("""
# gradient rows name the labels: direct inference is right for every row
vfl audit --strategy vafl
# the same attacks on noisy scalars, in a configuration of your own
vfl audit --strategy dpzv -c "dataset='breast-cancer' epsilon=0.5"
# a hostile party: can it decide scores?
vfl audit dominating triggerless --strategy split-nn
""")

VERIFY_EXAMPLES = _examples("""
# the log of a service
vfl audit-log verify serve/audit.jsonl
# files that continue each other, the oldest first
vfl audit-log verify serve/audit-2026-10.jsonl serve/audit.jsonl
# is the line still there that had this digest last month?
vfl audit-log verify serve/audit.jsonl --noted DIGEST
""")

FIND_EXAMPLES = _examples("""
# the requests that asked for two customers
vfl audit-log find serve/audit.jsonl C-1042 C-1043
# one customer, in all files of the log
for file in serve/audit*.jsonl; do vfl audit-log find $file C-1042; done
""")

PREDICT_EXAMPLES = _examples("""
# the test rows, with the model of the run in runs/a
vfl predict runs/a
# new people, whose rows are in the files that parties name
vfl predict runs/b -c "dataset='files:new.csv'" --out new-scores.parquet \\
--node-config "file='a.parquet' id='customer'" --node-config "file='b.csv'"
""")

EVALUATE_EXAMPLES = _examples("""
# outcomes of the people in runs/b/predictions.csv, with a column `month`
vfl evaluate runs/b --labels outcomes.csv -c "time='month'"
""")

DISTIL_EXAMPLES = _examples("""
# a model that predicts without the parties, from the finished run in runs/b
vfl distil runs/b --node-config "file='a.parquet' id='customer'" --node-config "file='b.csv'"
# with people that have no label, whose rows are in the files of all
vfl distil runs/b -c "dataset='files:everybody.csv'" --out runs/local \\
--node-config "file='a.parquet' id='customer'" --node-config "file='b.csv'"
# scores of that model
vfl predict runs/b/distilled
""")

EXPLAIN_EXAMPLES = _examples("""
# the test rows, with the model of the run in runs/a; each feature is permuted five times
vfl explain runs/a --repeats 5
# the test rows of a run on files
vfl explain runs/b --node-config "file='a.parquet' id='customer'" --node-config "file='b.csv'"
# people of another year, whose labels are in a new file
vfl explain runs/b -c "dataset='files:2027.csv'" \\
--node-config "file='a.parquet' id='customer'" --node-config "file='b.csv'"
""")

SERVE_EXAMPLES = _examples("""
# the test rows of a data set, to try it out; -c "serve-address='127.0.0.1:8081'" moves it
vfl serve runs/a
# people in files, with real nodes on this machine
vfl serve runs/b --engine supernodes -c "dataset='files:today.csv'" \\
--node-config "file='a.parquet' id='customer'" --node-config "file='b.csv'"
# scores of two people
curl -H "Authorization: Bearer TOKEN" -d '{"ids": [7, 12]}' http://127.0.0.1:8080/v1/predict
""")

REPORT_EXAMPLES = _examples("""
# the page about a run, runs/a/report.html
vfl report runs/a
# all runs below runs/ in the same charts and tables: the page is runs/report.html
vfl report runs
# two runs, and the runs of a comparison
vfl report runs/a runs/b runs/comparison --out page.html
""")
