"""Keyword arguments of `vfl_flower.train`; `vfl list` explains each.

This file is generated from vfl_flower/config/options/: python -m tests.options
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict

from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.protocol.system import System

Code = str | type[Any] | Callable[..., Any]
"""The name of a component, a class, or a function."""


class Options(TypedDict, total=False):
    """Options of a run. None stands for the default."""

    strategy: str | System | None
    dataset: str | None
    label: str | None
    target: Literal["classification", "regression"] | None
    class_weights: str | None
    label_range: str | None
    columns: str | None
    segments: str | None
    missing: Literal["refuse", "median"] | None
    missing_words: str | None
    text: Literal["refuse", "one-hot"] | None
    dates: Literal["refuse", "days"] | None
    align: Literal["psi", "any", "ids"] | None
    min_parties: int | None
    presence: float | None
    test_fraction: float | None
    validation_fraction: float | None
    image_split: Literal["quadrants", "rows", "columns", "flat"] | None
    tokenizer: str | None
    text_length: int | None
    augment: Code | None
    bottom_model: Code | None
    model_args: str | None
    bottom_hidden: int | None
    embedding_size: int | None
    embedding_activation: Literal["none", "relu", "sigmoid", "tanh"] | None
    bottom_bias: bool | None
    top_model: Code | None
    top_args: str | None
    top_hidden: int | None
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
    lr_step: int | None
    lr_decay: float | None
    warm_up: float | None
    clip_gradient: float | None
    precision: Literal["float32", "bfloat16"] | None
    subsets: Literal["off", "sampled", "laser"] | None
    freeze: bool | None
    regulariser: Literal["l2", "nonconvex"] | None
    regulariser_weight: float | None
    seed: int | None
    estimator: Code | None
    server_update: Code | None
    differences: Literal["one-sided", "two-sided"] | None
    directions: Code | None
    mu: float | None
    perturbs: Literal["each", "all"] | None
    label_access: Literal["private", "shared"] | None
    local_steps: int | None
    initial_surrogates: Literal["zero", "embeddings"] | None
    quorum: int | None
    window: int | None
    sampling: Code | None
    max_delay: int | None
    delay: Literal["none", "poisson", "exponential", "straggler"] | None
    codec: Code | None
    keep: float | None
    bits: int | None
    compression: Literal["direct", "error-feedback"] | None
    downlink_codec: Code | None
    downlink_keep: float | None
    downlink_bits: int | None
    downlink_compression: Literal["direct", "error-feedback"] | None
    privacy: Code | None
    embedding_noise: float | None
    inner_noise: float | None
    embedding_bound: float | None
    clip: float | None
    epsilon: float | None
    delta: float | None
    top_clip: float | None
    noise_multiplier: float | None
    calibration: Literal["known", "secret", "paper"] | None
    noise_seed: int | None
    threshold: str | None
    min_segment: int | None
    transport: Literal["auto", "stream", "messages"] | None
    stream_address: str | None
    stream_ports: str | None
    session_seconds: float | None
    party_timeout: float | None
    on_party_failure: Literal["stop", "continue"] | None
    eval_every: float | None
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
    score_timeout: float | None
    new_ids_per_day: int | None
