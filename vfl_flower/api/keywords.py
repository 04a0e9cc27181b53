"""Keyword arguments of `vfl_flower.train`; `vfl list` explains each.

This file is generated from vfl_flower/config/options/: python -m tests.options
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.protocol.system import System

Code = str | type[Any] | Callable[..., Any]
"""The name of a component, a class, or a function."""


class Options(TypedDict, total=False):
    """Options of a run. None stands for the default."""

    strategy: str | System | None
    expert: str | Mapping[str, Any] | None
    dataset: str | None
    label: str | None
    target: Literal["classification", "regression"] | None
    class_weights: str | None
    columns: str | None
    segments: str | None
    time: str | None
    split: Literal["random", "time"] | None
    missing: Literal["refuse", "median"] | None
    missing_words: str | None
    text: Literal["refuse", "one-hot"] | None
    dates: Literal["refuse", "days"] | None
    align: Literal["psi", "any", "ids"] | None
    min_parties: int | None
    match: str | None
    test_fraction: float | None
    validation_fraction: float | None
    bottom_model: Code | None
    model_args: str | None
    embedding_size: int | None
    top_model: Code | None
    combine: Literal["concat", "mean", "sum"] | None
    aggregation: Code | None
    loss: Code | None
    metrics: Code | None
    epochs: int | None
    patience: float | None
    calibrate: Literal["none", "platt", "isotonic"] | None
    batch_size: int | None
    party_lr: float | None
    server_lr: float | None
    optimizer: Code | None
    weight_decay: float | None
    lr_schedule: Literal["constant", "step", "cosine", "one-cycle"] | None
    subsets: Literal["off", "sampled", "laser"] | None
    freeze: bool | None
    seed: int | None
    estimator: Code | None
    quorum: int | None
    window: int | None
    codec: Code | None
    keep: float | None
    compression: Literal["direct", "error-feedback"] | None
    privacy: Code | None
    epsilon: float | None
    threshold: str | None
    flag_rate: float | None
    stream_address: str | None
    stream_ports: str | None
    party_timeout: float | None
    on_party_failure: Literal["stop", "continue"] | None
    checkpoint_every: int | None
    observer: Code | Callback | None
    log_format: Literal["text", "json"] | None
    resume: str | None
    grow: str | None
    device: str | None
    serve_address: str | None
    serve_certificate: str | None
    serve_key: str | None
    serve_token: str | None
    new_ids_per_day: int | None
