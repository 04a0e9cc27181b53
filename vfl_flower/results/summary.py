"""Fields of summary.json and history.jsonl. The reference of the results folder explains them."""

from typing import Any, NotRequired, TypedDict

Json = dict[str, Any]


class Spread(TypedDict):
    """Mean and largest of several numbers."""

    mean: float
    most: float


class PartyCost(TypedDict):
    """Cost of a party."""

    party: int
    name: NotRequired[str]
    columns: int
    embedding_size: int
    exchanges: int
    bytes_up: int
    bytes_down: int
    evaluation_bytes: int
    reply_seconds: NotRequired[Spread]
    reply_virtual_seconds: NotRequired[Spread]
    staleness: NotRequired[Spread]


class Progress(TypedDict):
    """Cost and figures so far; bytes are of arrays. Null figures do not apply."""

    steps: int
    exchanges: int
    bytes_up: int
    bytes_down: int
    evaluation_bytes: int
    seconds: float
    virtual_seconds: float
    train_loss: float | None
    validation_loss: float | None
    validation_accuracy: float | None
    validation_auc: float | None
    validation_rmse: float | None
    validation_r2: float | None
    test_loss: float | None
    test_accuracy: float | None
    test_auc: float | None
    test_rmse: float | None
    test_r2: float | None


class Entry(Progress):
    """One line of history.jsonl: an evaluation."""

    epoch: float


class Summary(Progress):
    """The content of summary.json."""

    strategy: str
    engine: str
    transport: str
    dataset: str
    parties: int
    seed: int
    began: str
    ended: str
    failure: str | None
    data: Json
    coverage: NotRequired[Json]
    schedule: str
    quorum: int
    window: int
    window_measured: NotRequired[Json | None]
    epochs: float
    best_epoch: float | None
    peak_memory_mb: float
    assessment: Json | None
    test_by_parties: NotRequired[Json]
    test_by_party: NotRequired[Json]
    unknown_rows: NotRequired[int]
    epsilon: float | None
    delta: float | None
    epsilon_protects: NotRequired[str]
    epsilon_relation: NotRequired[str]
    epsilon_adversary: NotRequired[str]
    epsilon_of_paper: NotRequired[float | None]
    epsilon_secret_batches: NotRequired[float]
    gaussian_mu: NotRequired[float]
    noise_multiplier: NotRequired[float]
    failed_parties: list[int]
    by_party: list[PartyCost]
    best_party: NotRequired[int | str]
    test_accuracy_of_party: NotRequired[Json]
    test_r2_of_party: NotRequired[Json]
    alignment: NotRequired[str]
    rows: NotRequired[int]
    rerun: NotRequired[Json]
    distilled: NotRequired[Json]
    seeds: NotRequired[list[int]]
    deviation: NotRequired[Json]
    config: Json
    versions: Json
    code: str
