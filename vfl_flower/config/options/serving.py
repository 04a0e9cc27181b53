"""Options of the online service, and of the figures of a run for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass

from vfl_flower.config.options.option import key

_FLOWER = "flower"


@dataclass(frozen=True)
class ServingConfig:
    """Where the label holder listens, and how long a service waits for a party."""

    serve_address: str = key(
        "127.0.0.1:8080",
        "Sets the address and the port on which the label holder answers requests for scores. With "
        "`observer='prometheus'`, it answers GET /metrics there during training.",
        example="task='serve' model='runs/a' serve-address='127.0.0.1:8081'",
        engine=_FLOWER,
        related=("task", "observer", "serve-certificate", "serve-token"),
    )
    serve_certificate: str = key(
        "",
        "Names the file of the TLS certificate (PEM) for `serve-address`. A renewed file counts "
        "within a second. Without it, the label holder listens on this machine only.",
        example="task='serve' model='runs/a' serve-certificate='bank.crt' serve-key='bank.key'",
        engine=_FLOWER,
        related=("serve-key", "serve-address"),
    )
    serve_key: str = key(
        "",
        "Names the file of the certificate's private key (PEM).",
        example="task='serve' model='runs/a' serve-certificate='bank.crt' serve-key='bank.key'",
        engine=_FLOWER,
        related=("serve-certificate",),
    )
    serve_token: str = key(
        "",
        "Names the file of callers and their bearer tokens, `NAME TOKEN` in each line. The empty "
        "text stands for RUN/serve.token. The label holder makes a file that is missing. "
        "Prometheus needs a token too.",
        example="task='serve' model='runs/a' serve-token='/etc/vfl/callers.txt'",
        engine=_FLOWER,
        related=("serve-address",),
    )
    score_timeout: float = key(
        0.2,
        "Limits the seconds that a score waits for a party, and doubles for each 256 ids of a "
        "batch. A model of any subset then answers without the party. Another model refuses and "
        "names the party.",
        example="task='serve' model='runs/a' score-timeout=0.5",
        expert=True,
        engine=_FLOWER,
        above=0,
        related=("party-timeout", "subsets"),
    )
    max_withdrawn: float = key(
        1.0,
        "Limits the share of the training set's people who have withdrawn since. Above it, the "
        "service answers no request for scores.",
        example="task='serve' model='runs/a' max-withdrawn=0.01",
        expert=True,
        engine=_FLOWER,
        least=0,
        related=("new-ids-per-day",),
    )
    new_ids_per_day: int = key(
        1000,
        "Limits the ids that a caller may ask about in a day of UTC, if they are in no file of the "
        "label holder. Further requests with such ids get 429. With 0, the parties are asked about "
        "no such id.",
        example="task='serve' model='runs/a' new-ids-per-day=20000",
        engine=_FLOWER,
        least=0,
        related=("serve-token", "score-timeout"),
    )
