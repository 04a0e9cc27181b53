"""Serve Flower's arguments of `Vertical.start`, and check your hooks.

A hook that left out a message or a reply would have the run wait for ever, and is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord

from strategies.run import Run
from vfl_flower.config.errors import ConfigError
from vfl_flower.label_holder.callbacks import Callback

_HOOKS = "configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate"


class RoundLimit(Callback):
    """Stops training after so many evaluations, which are Flower's rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Stop, if this was the last round."""
        if len(self.run.state.history) >= self.rounds:
            self.run.stop(f"num_rounds = {self.rounds} are done")


class CentralEvaluation(Callback):
    """Calls Flower's ``evaluate_fn`` after each evaluation."""

    def __init__(
        self,
        evaluate: Callable[[int, ArrayRecord], MetricRecord | None],
        arrays: Callable[[], ArrayRecord],
        found: dict[int, MetricRecord],
    ) -> None:
        self._evaluate = evaluate
        self._arrays = arrays
        self._found = found

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Evaluate the model that has been evaluated."""
        self.evaluate(len(self.run.state.history))

    def evaluate(self, number: int) -> None:
        """Evaluate the current top model as the one of a round."""
        metrics = self._evaluate(number, self._arrays())
        if metrics is not None:
            self._found[number] = metrics


def overrides(kind: type, base: type) -> bool:
    """Return whether a subclass overrides a hook of this base."""
    return any(getattr(kind, name) is not getattr(base, name) for name in _HOOKS)


def check_sent(run: Run) -> None:
    """Refuse, by `ConfigError`, hooks that send other messages than ``super()``."""
    out = sorted(node for node, _ in run.messenger.out.values())
    due = sorted(record.node_id for record in run.records if record.in_flight)
    if out != due:
        raise ConfigError(
            f"configure_train or configure_evaluate sends messages to the nodes {out}, and super() "
            f"yields messages to {due}. Send every message that super() yields, and no other. To "
            "have fewer parties in a step, set `quorum`."
        )


def check_taken(run: Run, replies: Sequence[Message]) -> None:
    """Refuse, by `ConfigError`, hooks that leave out replies."""
    out, keys = run.messenger.out, [reply.metadata.reply_to_message_id for reply in replies]
    left = sorted(out[key][0] for key in keys if key in out)
    if left:
        raise ConfigError(
            f"aggregate_train or aggregate_evaluate leaves out the replies of the nodes {left}: "
            "pass all replies on to super()."
        )


def refuse_config(name: str, config: ConfigRecord) -> None:
    """Refuse, by `ConfigError`, a configuration that no message carries."""
    raise ConfigError(
        f"{name} has {', '.join(sorted(config))}, which reach no party: parties learn by the run "
        "configuration. Set its options there, or use the values in a hook of yours, and give "
        "super() an empty ConfigRecord."
    )
