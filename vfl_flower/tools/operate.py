"""Commands of `vfl` for those who operate a model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from vfl_flower.config.errors import Terminated, terminating
from vfl_flower.tools import options
from vfl_flower.tools.command import Command

app = typer.Typer()


@app.command("explain", cls=Command, epilog=options.EXPLAIN_EXAMPLES)
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
    from vfl_flower.tasks.inference.explanation import FILE, in_words

    _, keys, node_configs = options.given(run_config, node_config)
    keys |= {"model": model, **({"without": without} if without else {})}
    keys.setdefault("repeats", repeats)
    logging.getLogger("flwr.notice").setLevel(logging.INFO)
    print(in_words(explain_local(keys, node_configs)))
    out = Path(str(keys.get("out") or model)).expanduser().absolute()
    print(f"explanation: {out / FILE}")


@app.command("serve", cls=Command, epilog=options.SERVE_EXAMPLES)
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
    logging.getLogger("flwr.notice").setLevel(logging.INFO)
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
