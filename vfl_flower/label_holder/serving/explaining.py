"""Contributions to scores, computed in a separate thread: other requests do not wait for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from vfl_flower.config.errors import VflError

log = logging.getLogger("flwr")

_MOST = 20  # requests that wait for contributions


class Explaining:
    """The requests that wait for contributions. Only the web's thread uses it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "contributions")
        self._waiting = 0

    @property
    def is_full(self) -> bool:
        """Return whether no further request can wait."""
        return self._waiting >= _MOST

    @contextmanager
    def counted(self, explains: bool) -> Iterator[None]:
        """Count a request within the block, if it asks for contributions."""
        self._waiting += explains
        try:
            yield
        finally:
            self._waiting -= explains

    async def run(self, explain: Callable[[], None]) -> None:
        """Compute the contributions of a request, after earlier requests.

        Raises
        ------
        VflError
            If that fails.
        """
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, explain)
        except VflError:
            raise
        except Exception:
            log.exception("The service failed to explain scores.")
            raise VflError("The service failed. Its log says why.") from None
