"""The Flower ServerApp of the label holder: configuration in, results folder out."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import strategies
from strategies.vertical import Vertical
from vfl_flower.config import RunConfig, keys
from vfl_flower.data import load_labels
from vfl_flower.errors import VflError
from vfl_flower.local_grid import engine_of
from vfl_flower.provenance import code_digest, versions
from vfl_flower.results import Results
from vfl_flower.stream import StreamGrid

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
    """Train the configured system with the parties of the grid; whatever happens, save it."""
    config = strategies.resolve(context.run_config)
    labels = load_labels(config)
    streams = config.transport != "messages" and engine_of(grid) != "local"
    carrier = StreamGrid(grid, config) if streams else nullcontext(grid)
    results = Results(config)
    strategy = strategies.SYSTEMS[config.strategy](config, labels, results.add)
    failure = None
    try:
        with carrier as grid:
            strategy.start(grid)
    except BaseException as error:
        failure = str(error) or type(error).__name__
        raise
    finally:
        results.finish(summarise(config, strategy, failure), strategy.top_arrays())


def summarise(config: RunConfig, strategy: Vertical, failure: str | None) -> dict[str, Any]:
    """``summary.json``: what ran, what it reached, and what it took."""
    return {
        "strategy": config.strategy,
        "engine": strategy.engine,
        "transport": strategy.transport,
        "dataset": config.dataset,
        **strategy.figures(),
        "seed": config.seed,
        "failure": failure,
        "config": {key: getattr(config, spec.name) for key, spec in keys().items()},
        "versions": versions(),
        "code": code_digest(),
    }
