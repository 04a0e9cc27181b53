"""Figures of a training run for Prometheus (``observer='prometheus'``).

The label holder answers ``GET /metrics`` at ``serve-address`` while the run trains. A caller needs
a token, as for `vfl serve`.
"""

import math
import sys
import time
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

from vfl_flower.config.errors import ConfigError, Terminated, VflError
from vfl_flower.config.logs import notice
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.transport.http.tokens import tokens_of

_STOPPED = 16.0  # most seconds that a stopped run waits


class Prometheus(Callback):
    """Answer ``GET /metrics`` in another thread, from before the first step until the end."""

    def __init__(self) -> None:
        try:
            from vfl_flower.label_holder.run_metrics import RunMetrics, app_of
            from vfl_flower.transport.http.listening import listening
        except ImportError as error:
            raise ConfigError(
                f"observer = 'prometheus' needs {error.name}, which is not installed. Run: "
                "pip install 'vfl-flower[serve]'."
            ) from None
        self._metrics_of, self._app_of, self._listening = RunMetrics, app_of, listening
        self._exits = ExitStack()

    def began(self, folder: Path) -> None:
        """Listen."""
        serving = self.run.config.serving
        tokens = tokens_of(serving, folder)
        self._metrics = self._metrics_of(self.run, folder.name)
        app = self._app_of(self._metrics, tokens, folder)
        url = self._exits.enter_context(self._listening(app, serving))
        self._exits.callback(self._tell_end)
        notice.info("Prometheus can read this run at %s/metrics", url)
        notice.info("The tokens of its callers are in %s", tokens.path)

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Compute the spent epsilon."""
        self._metrics.epsilon = self.run.epsilon

    def failed(self, party: int, error: VflError) -> None:
        """Count a party's failure."""
        self._metrics.failures[party] += 1

    def saved(self) -> None:
        """Note when the checkpoint was saved."""
        self._metrics.checkpoints += 1
        self._metrics.saved_at = time.time()

    def written(self) -> None:
        """Stop listening, and free the port."""
        self._exits.close()

    def _tell_end(self) -> None:
        """Wait until Prometheus has read the end; else the run would look as if it was killed."""
        error = sys.exc_info()[1]
        signals = KeyboardInterrupt, Terminated
        stopped = isinstance(error, signals)
        if error and (not stopped or self.run.transport.silent):  # its SuperLink has gone
            return
        self._metrics.over = True
        seconds = min(self._metrics.seconds_until_read, _STOPPED if stopped else math.inf)
        if seconds:
            notice.info("Prometheus reads within %.0f s that the run has ended.", seconds)
            with suppress(*signals) if stopped else nullcontext():  # a second signal ends the wait
                time.sleep(seconds)
