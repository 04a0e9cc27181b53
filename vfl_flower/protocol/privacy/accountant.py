"""The cost of noise: accountants of releases, and the meaning of an epsilon."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.privacy.journal import ANSWERED, Event

EVERYONE = "all parties together, the network, and whoever gets the model"
"""The adversary of noise that protects labels."""


@dataclass(frozen=True)
class Guarantee:
    """Texts beside an epsilon: its data, how data sets differ, and who cannot tell them apart."""

    protects: str
    relation: str
    adversary: str

    def figures(self) -> dict[str, str]:
        """Return the texts as figures of ``summary.json``."""
        return {f"epsilon_{name}": value for name, value in asdict(self).items()}


def delta_of(config: RunConfig, rows: int) -> float:
    """Return the delta of all epsilons: well below one over the N training rows."""
    return min(1e-5, 0.1 / rows) if config.privacy.delta is None else config.privacy.delta


class Released(Protocol):
    """An estimator, as privacy sees it: the content and the viewers of its uploads."""

    uploads_per_row: ClassVar[int]
    uploads_reach: ClassVar[str]
    answers_by_scalars: ClassVar[bool]


class Accountant:
    """Count the releases of a run, and compute their cost. The base class claims nothing."""

    counts: ClassVar[tuple[int, ...]] = ()

    def __init__(self, config: RunConfig, rows: int, estimator: Released) -> None:
        self.config = config
        self.rows = rows
        self.estimator = estimator
        self.released = 0

    @property
    def delta(self) -> float:
        """Return the delta of all epsilons of this run."""
        return delta_of(self.config, self.rows)

    def steps_allowed(self, planned: int, parties: int, quorum: int, top_learns: bool) -> int:
        """Return how many of the planned steps, over all parties, the budget allows."""
        return planned

    def warn(self, steps: int, columns: int, outputs: int) -> None:
        """Warn, before training, if noise leaves too little to learn from."""

    def events_within_budget(self, group: Sequence[tuple[int, Window]]) -> list[Event] | None:
        """Return the events of a quorum's answers; None if they exceed the budget."""
        return [
            Event(ANSWERED, party, len(window.lengths), 1, 0, window.ids) for party, window in group
        ]

    def count(self, event: Event) -> None:
        """Count a release. A resumed run counts the events of its log again."""

    def so_far(self) -> Iterator[Event]:
        """Yield few events that bring a new accountant to the same counts."""
        return iter(())

    def uploads(self) -> int:
        """Return how often the most uploaded record of any party was uploaded."""
        return 0

    def figures(self) -> dict[str, Any]:
        """Return the privacy part of ``summary.json``. An epsilon of None claims nothing.

        ``gaussian_mu`` is in it where all releases are one Gaussian mechanism (`together`).
        """
        return {"epsilon": None, "delta": None, "epsilon_of_paper": None}
