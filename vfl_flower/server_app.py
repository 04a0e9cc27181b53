"""The Flower ServerApp of the label holder: configuration in, results folder out."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import strategies
from strategies.vertical import Vertical
from vfl_flower.config import RunConfig, keys
from vfl_flower.data.alignment import align
from vfl_flower.data.own_files import OwnFile
from vfl_flower.data.sources import Labels, load_labels, load_own_labels
from vfl_flower.errors import ConfigError, VflError
from vfl_flower.holder import checkpoint
from vfl_flower.holder.checkpoint import Keeper
from vfl_flower.holder.predict import predict
from vfl_flower.holder.results import Results
from vfl_flower.provenance import code_digest, versions
from vfl_flower.runtimes.local import engine_of
from vfl_flower.runtimes.stream import StreamGrid

log = logging.getLogger("flwr")


class _Sentence(logging.Filter):
    """Have Flower log an error of this application as its sentence, without a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record; let it pass."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, VflError):
            record.msg, record.args, record.exc_info = str(error), (), None
        return True


log.addFilter(_Sentence())

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Do the configured task with the parties of the grid."""
    config = strategies.configured(context.run_config)
    if config.task == "predict":
        with _carrier(grid, config) as grid:
            predict(grid, config)
    else:
        _train(grid, config, str(context.run_id))


def _train(grid: Grid, config: RunConfig, run: str) -> None:
    """Train the configured system; whatever happens, save it."""
    found = checkpoint.load(config.resume) if config.resume else None
    own = OwnFile.of_label_holder(config) if config.own_files else None
    if own:
        own.check()
    else:
        load_labels(config)
    carrier = _carrier(grid, config)
    results = Results(config, found.strategy["history"] if found else None)
    keeper = Keeper(results.folder, run, found)
    strategy: Vertical | None = None
    failure = None
    try:
        with carrier as grid:
            labels = _own_labels(grid, config, own, keeper) if own else load_labels(config)
            if found and labels.about != found.about_labels:
                raise ConfigError(
                    f"{config.dataset} has other rows, classes or values than when the run in "
                    f"{config.resume} began: put back the data of then."
                )
            strategy = strategies.SYSTEMS[config.strategy](config, labels, results.add, keeper)
            strategy.start(grid)
    except BaseException as error:
        failure = str(error) or type(error).__name__
        raise
    finally:
        if not found or (strategy and strategy.ready):  # else the run that was is as it was
            top = strategy.top_arrays() if strategy else {}
            results.finish(summarise(config, grid, strategy, failure), top)


def _carrier(grid: Grid, config: RunConfig) -> AbstractContextManager[Grid]:
    """The Grid that carries the messages: a `StreamGrid`, where there are streams."""
    streams = config.transport != "messages" and engine_of(grid) != "local"
    return StreamGrid(grid, config) if streams else nullcontext(grid)


def _own_labels(grid: Grid, config: RunConfig, own: OwnFile, keeper: Keeper) -> Labels:
    """The labels of the rows that all have."""
    if not keeper.found:
        keeper.rows = align(grid, config, own)
    elif len(own.ids) <= keeper.rows.max():
        raise ConfigError(f"{own.path} has lost rows since the run in {config.resume} began.")
    return load_own_labels(config, own, keeper.rows)


def summarise(
    config: RunConfig, grid: Grid, strategy: Vertical | None, failure: str | None
) -> dict[str, Any]:
    """``summary.json``: what ran, what it reached, and what it took."""
    return {
        "strategy": config.strategy,
        "engine": engine_of(grid),
        "transport": str(getattr(grid, "transport", "messages")),
        "dataset": config.dataset,
        **(strategy.figures() if strategy else {}),
        "seed": config.seed,
        "failure": failure,
        "config": {key: getattr(config, spec.name) for key, spec in keys().items()},
        "versions": versions(),
        "code": code_digest(),
    }
