"""Options of the runtime: where a run takes place, what it saves, who watches it."""

from __future__ import annotations

from dataclasses import dataclass

from vfl_flower.config import logs, plugins
from vfl_flower.config.options.option import basic, key, setting

_EXCHANGES_APART = 1000  # checkpoints, on SuperNodes
_NODES = "supernodes"


@dataclass(frozen=True)
class RunningConfig:
    """Where and how a run takes place."""

    transport: str = setting(
        "auto",
        "Chooses how messages travel on SuperNodes. `stream` connects each party to the label "
        "holder. `messages` uses Flower's messages. `auto` streams if every party can connect.",
        example="transport='messages'",
        engine=_NODES,
        choices=("auto", "stream", "messages"),
    )
    stream_address: str = key(
        "127.0.0.1",
        "Names the host by which parties reach the label holder. Add :PORT if a router or relay "
        "forwards that port.",
        example="stream-address='localhost'",
        engine=_NODES,
    )
    stream_ports: str = key(
        "9500-9599",
        "Sets the port that the label holder listens on, or a range of ports to choose from.",
        example="stream-ports='9600-9699'",
        engine=_NODES,
    )
    session_seconds: float = setting(
        600.0,
        "Sets the length of a streaming session in seconds. After each session, parties save "
        "their state and reconnect.",
        example="session-seconds=300",
        engine=_NODES,
        above=0,
    )
    parties: int = key(
        0,
        "Sets the number of parties to wait for. 0 waits for all connected nodes.",
        example="parties=4",
        engine="ray",
        least=0,
    )
    party_timeout: float = key(
        600.0,
        "Limits the seconds that a party may stay silent. The limit also covers start-up and "
        "alignment.",
        example="party-timeout=60",
        above=0,
    )
    on_party_failure: str = key(
        "stop",
        "Chooses what happens when a party fails. `continue` uses the party's last embeddings. It "
        "needs a quorum below all parties.",
        example="strategy='vafl' on-party-failure='continue'",
        choices=("stop", "continue"),
    )
    eval_every: float = setting(
        1.0,
        "Sets the epochs, or parts of an epoch, between two evaluations.",
        example="eval-every=0.5",
        above=0,
    )
    checkpoint_every: int | None = key(
        None,
        "Sets the exchanges between two checkpoints, at the label holder and at the parties. 0 "
        "saves one checkpoint at the end.",
        example="checkpoint-every=100",
        auto="1000 on SuperNodes, else 0.",
        least=0,
    )
    retention_days: int = setting(
        0,
        "Sets the days after which the label holder removes alignments, and predictions in the "
        "folder of the model. It looks when a task begins. 0 keeps them.",
        example="retention-days=365",
        least=0,
    )
    observer: str = key(
        "none",
        "Names an observer of the run. It is told of evaluations, progress, failures and the end. "
        "`tensorboard` writes scalars to RUN/tensorboard. `prometheus` answers GET /metrics at "
        "`serve-address` during training. FILE.py:NAME names your own Callback.",
        example="observer='tensorboard'",
        registry=plugins.OBSERVERS,
    )
    log_format: str = key(
        "text",
        "Sets the format of log records. `json` writes a JSON line for each record, as log "
        "collectors need it. A party may set its format in its node configuration.",
        example="log-format='json'",
        choices=logs.FORMATS,
    )
    resume: str = basic(
        "",
        "Names the results folder of an interrupted run to resume.",
        example="resume='runs/a'",
        before="runs/a was interrupted",
    )
    grow: str = key(
        "",
        "Starts from the models of a finished run, perhaps with more parties. The value is that "
        "run's results folder. Options that you leave out keep the values of that run.",
        example="grow='runs/a'",
        before="runs/a has finished",
    )
    rerun: str = setting(
        "",
        "Repeats the finished run in this results folder to the last bit, and compares messages.",
        example="rerun='runs/a'",
        before="runs/a has finished",
    )
    device: str = basic(
        "auto",
        "Chooses where models run: cpu, cuda, or auto. `auto` uses a GPU if there is one.",
        example="device='cpu'",
        values="'auto', 'cpu' or 'cuda'",
    )
    out: str = basic(
        "",
        "Names the results folder. The empty text stands for runs/STRATEGY-DATASET-TIME.",
        example="out='runs/a'",
    )

    def exchanges_apart(self, simulated: bool) -> int:
        """Return the exchanges between checkpoints; 0 for one checkpoint at the end."""
        if self.checkpoint_every is not None:
            return self.checkpoint_every
        return 0 if simulated else _EXCHANGES_APART


@dataclass(frozen=True)
class ServingConfig:
    """Where the label holder listens, and how long a service waits for a party."""

    serve_address: str = key(
        "127.0.0.1:8080",
        "Sets the address and the port on which the label holder answers requests for scores. With "
        "`observer='prometheus'`, it answers GET /metrics there during training.",
        example="task='serve' model='runs/a' serve-address='127.0.0.1:8081'",
    )
    serve_certificate: str = key(
        "",
        "Names the file of the TLS certificate (PEM) for `serve-address`. A renewed file counts "
        "within a second. Without it, the label holder listens on this machine only.",
        example="task='serve' model='runs/a' serve-certificate='bank.crt' serve-key='bank.key'",
    )
    serve_key: str = key(
        "",
        "Names the file of the certificate's private key (PEM).",
        example="task='serve' model='runs/a' serve-certificate='bank.crt' serve-key='bank.key'",
    )
    serve_token: str = key(
        "",
        "Names the file of callers and their bearer tokens, `NAME TOKEN` in each line. The empty "
        "text stands for RUN/serve.token. The label holder makes a file that is missing. "
        "Prometheus needs a token too.",
        example="task='serve' model='runs/a' serve-token='/etc/vfl/callers.txt'",
    )
    score_timeout: float = setting(
        0.2,
        "Limits the seconds that a score waits for a party, and doubles for each 256 ids of a "
        "batch. A model of any subset then answers without the party. Another model refuses and "
        "names the party.",
        example="task='serve' model='runs/a' score-timeout=0.5",
        above=0,
    )
    max_withdrawn: float = setting(
        1.0,
        "Limits the share of the training set's people who have withdrawn since. Above it, the "
        "service answers no request for scores.",
        example="task='serve' model='runs/a' max-withdrawn=0.01",
        least=0,
    )
    new_ids_per_day: int = key(
        1000,
        "Limits the ids that a caller may ask about in a day of UTC, if they are in no file of the "
        "label holder. Further requests with such ids get 429. With 0, the parties are asked about "
        "no such id.",
        example="task='serve' model='runs/a' new-ids-per-day=20000",
        least=0,
    )
