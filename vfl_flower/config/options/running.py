"""Options of the runtime: where a run takes place, what it saves, who watches it."""

from __future__ import annotations

from dataclasses import dataclass

from vfl_flower.config import logs, plugins
from vfl_flower.config.options.option import key

_EXCHANGES_APART = 1000  # checkpoints, on SuperNodes
_NODES = "supernodes"


@dataclass(frozen=True)
class RunningConfig:
    """Where and how a run takes place."""

    transport: str = key(
        "auto",
        "Chooses how messages travel on SuperNodes. `stream` connects each party to the label "
        "holder. `messages` uses Flower's messages. `auto` streams if every party can connect.",
        example="transport='messages'",
        expert=True,
        engine=_NODES,
        choices=("auto", "stream", "messages"),
        related=("stream-address", "stream-ports", "window"),
    )
    stream_address: str = key(
        "127.0.0.1",
        "Names the host by which parties reach the label holder. Add :PORT if a router or relay "
        "forwards that port.",
        example="stream-address='localhost'",
        engine=_NODES,
        related=("transport", "stream-ports"),
    )
    stream_ports: str = key(
        "9500-9599",
        "Sets the port that the label holder listens on, or a range of ports to choose from.",
        example="stream-ports='9600-9699'",
        engine=_NODES,
        related=("transport", "stream-address"),
    )
    session_seconds: float = key(
        600.0,
        "Sets the length of a streaming session in seconds. After each session, parties save "
        "their state and reconnect.",
        example="session-seconds=300",
        expert=True,
        engine=_NODES,
        above=0,
        related=("transport", "checkpoint-every"),
    )
    parties: int = key(
        0,
        "Sets the number of parties to wait for. 0 waits for all connected nodes.",
        example="parties=4",
        engine="ray",
        least=0,
        related=("party-timeout",),
    )
    party_timeout: float = key(
        600.0,
        "Limits the seconds that a party may stay silent. The limit also covers start-up and "
        "alignment.",
        example="party-timeout=60",
        above=0,
        related=("on-party-failure",),
    )
    on_party_failure: str = key(
        "stop",
        "Chooses what happens when a party fails. `continue` uses the party's last embeddings. It "
        "needs a quorum below all parties.",
        example="strategy='vafl' on-party-failure='continue'",
        choices=("stop", "continue"),
        related=("quorum", "party-timeout"),
    )
    eval_every: float = key(
        1.0,
        "Sets the epochs, or parts of an epoch, between two evaluations.",
        example="eval-every=0.5",
        expert=True,
        above=0,
        related=("epochs", "patience"),
    )
    checkpoint_every: int | None = key(
        None,
        "Sets the exchanges between two checkpoints, at the label holder and at the parties. 0 "
        "saves one checkpoint at the end.",
        example="checkpoint-every=100",
        auto="1000 on SuperNodes, else 0.",
        least=0,
        related=("resume", "session-seconds"),
    )
    retention_days: int = key(
        0,
        "Sets the days after which the label holder removes alignments, and predictions in the "
        "folder of the model. It looks when a task begins. 0 keeps them.",
        example="retention-days=365",
        expert=True,
        least=0,
        related=("checkpoint-every",),
    )
    observer: str = key(
        "none",
        "Names an observer of the run. It is told of evaluations, progress, failures and the end. "
        "`tensorboard` writes scalars to RUN/tensorboard. `prometheus` answers GET /metrics at "
        "`serve-address` during training. FILE.py:NAME names your own Callback.",
        example="observer='tensorboard'",
        registry=plugins.OBSERVERS,
        related=("eval-every", "metrics", "serve-address"),
    )
    log_format: str = key(
        "text",
        "Sets the format of log records. `json` writes a JSON line for each record, as log "
        "collectors need it. A party may set its format in its node configuration.",
        example="log-format='json'",
        choices=logs.FORMATS,
        related=("observer", "party-timeout"),
    )
    resume: str = key(
        "",
        "Names the results folder of an interrupted run to resume.",
        example="resume='runs/a'",
        before="runs/a was interrupted",
        basic=True,
        related=("out", "checkpoint-every"),
    )
    grow: str = key(
        "",
        "Starts from the models of a finished run, perhaps with more parties. The value is that "
        "run's results folder. Options that you leave out keep the values of that run.",
        example="grow='runs/a'",
        before="runs/a has finished",
        related=("freeze", "resume"),
    )
    rerun: str = key(
        "",
        "Repeats the finished run in this results folder to the last bit, and compares messages.",
        example="rerun='runs/a'",
        before="runs/a has finished",
        expert=True,
        related=("resume", "seed"),
    )
    device: str = key(
        "auto",
        "Chooses where models run: cpu, cuda, or auto. `auto` uses a GPU if there is one.",
        example="device='cpu'",
        basic=True,
        values="'auto', 'cpu' or 'cuda'",
        related=("precision",),
    )
    out: str = key(
        "",
        "Names the results folder. The empty text stands for runs/STRATEGY-DATASET-TIME.",
        example="out='runs/a'",
        basic=True,
        related=("resume",),
    )

    def exchanges_apart(self, simulated: bool) -> int:
        """Return the exchanges between checkpoints; 0 for one checkpoint at the end."""
        if self.checkpoint_every is not None:
            return self.checkpoint_every
        return 0 if simulated else _EXCHANGES_APART
