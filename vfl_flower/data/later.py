"""Libraries whose import takes long: each is imported when one of its names is first used."""

from importlib import import_module
from typing import Any


class _Later:
    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._module), name)


jellyfish: Any = _Later("jellyfish")
pa: Any = _Later("pyarrow")
pa_csv: Any = _Later("pyarrow.csv")
pc: Any = _Later("pyarrow.compute")
pd: Any = _Later("pandas")
pq: Any = _Later("pyarrow.parquet")
