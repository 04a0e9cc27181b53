"""The privacy parts of a run, without the run."""

from typing import Any

from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import Labels
from vfl_flower.protocol import estimators
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.privacy.release_log import ReleaseLog


def accountant_of(config: RunConfig, rows: int) -> Any:
    """The accountant of a run on so many training rows."""
    return mechanism_of(config).accountant(rows, estimators.choose(config)(config))


def log_of(config: RunConfig, rows: int) -> ReleaseLog:
    """The log of a run on so many training rows, and its accountant."""
    return ReleaseLog(accountant_of(config, rows))


def epsilon(config: RunConfig, rows: int, uploads: int) -> float:
    """Epsilon of a record, among so many, that one party has uploaded so often."""
    found = mechanism_of(config).epsilon_of_uploads(rows, uploads)
    assert found is not None
    return found


def learned_from(config: RunConfig, labels: Labels) -> tuple[Labels, float | None]:
    """The labels that a run learns from, and the epsilon that it has then spent."""
    accountant = accountant_of(config, len(labels.train))
    return mechanism_of(config).labels(labels, accountant), accountant.figures()["epsilon"]
