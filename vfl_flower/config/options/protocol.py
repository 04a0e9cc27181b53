"""Options of the protocol: the schedule, compressed messages, and noise with its budget."""

from __future__ import annotations

from dataclasses import dataclass

from vfl_flower.config import plugins
from vfl_flower.config.options.option import basic, key, setting

_EMBEDDINGS = "strategy='vafl' privacy='perturbed-embedding'"


@dataclass(frozen=True)
class ScheduleConfig:
    """Quorum, windows, delays, and the rows of a step."""

    quorum: int | None = basic(
        None,
        "Sets how many uploads the label holder waits for. All parties is synchronous, 1 is "
        "asynchronous.",
        example="strategy='vafl-t' quorum=2",
        auto="the system's own.",
        least=1,
        symbol="t, in VAFL",
    )
    window: int | None = key(
        None,
        "Sets how many steps of a party one message exchange carries. Large windows save round "
        "trips and make embeddings staler.",
        example="window=8",
        auto="1 in process, and in runs of at most 64 steps an epoch. Else it starts at 1, or at "
        "8 over streams between nodes, grows, and shrinks when the loss jumps. It grows to at most "
        "8 under Ray and 16 between nodes, but no longer than measured times make worthwhile. Over "
        "messages between nodes it grows in small runs too. Zeroth order: 16 in place of 1, and at "
        "most 64.",
        least=1,
    )
    sampling: str = setting(
        "shuffle",
        "Chooses how mini-batches are drawn. `shuffle` slices a shuffled epoch. `poisson` takes "
        "each row with probability batch-size / rows. `replacement` draws each mini-batch from all "
        "rows, as the papers do.",
        example="sampling='poisson'",
        registry=plugins.SAMPLINGS,
    )
    max_delay: int = setting(
        0,
        "Limits the age of an embedding that the label holder uses, in label-holder steps. 0 sets "
        "no limit.",
        example="strategy='vafl' max-delay=20",
        least=0,
        symbol="D, in VAFL",
    )
    delay: str = setting(
        "none",
        "Simulates delays on the virtual clock of the in-process engine. `poisson` and "
        "`exponential` follow VAFL's appendix G. `straggler` makes one party 20 to 60 % slower "
        "(AsyREVEL).",
        example="strategy='vafl' delay='exponential'",
        choices=("none", "poisson", "exponential", "straggler"),
    )


@dataclass(frozen=True)
class CodecConfig:
    """How one direction of a party's link is compressed.

    Options of the downlink have the prefix ``downlink-``.
    """

    codec: str = basic(
        "identity",
        "Chooses how parties compress the embeddings that they upload. `top-k` keeps the largest "
        "entries. `qsgd` rounds entries at random. `float16` and `bfloat16` use 2 bytes.",
        example="codec='top-k'",
        registry=plugins.CODECS,
    )
    keep: float | None = key(
        None,
        "Sets the share of a mini-batch's entries that top-k keeps.",
        example="codec='top-k' keep=0.05",
        auto="0.1",
    )
    bits: int | None = setting(
        None,
        "Sets the bits of a number. qsgd has 2^bits levels, and 1 to 16 bits. top-k has 16, or 32 "
        "for exact values.",
        example="codec='qsgd' bits=3",
        auto="4 for qsgd, 16 for top-k",
    )
    compression: str = key(
        "direct",
        "Chooses what the codec compresses. `direct` compresses the embedding (CVFL). "
        "`error-feedback` compresses its difference from an estimate that both ends keep (EF-VFL).",
        example="codec='top-k' compression='error-feedback'",
        choices=("direct", "error-feedback"),
    )

    @property
    def surrogates(self) -> bool:
        """Return whether both ends keep an estimate of the message.

        The identity codec needs none, because it changes no number.
        """
        return self.compression == "error-feedback" and self.codec != "identity"


@dataclass(frozen=True)
class PrivacyConfig:
    """Noise, and the budget that it must keep."""

    mechanism: str = basic(
        "none",
        "Chooses the privacy mechanism. `labels` randomises the labels once, before training. "
        "`scalar` clips loss differences and adds noise to them and to the top model (DPZV). "
        "`perturbed-embedding` adds noise to everything that leaves a party (VAFL, section 4).",
        example="privacy='labels' epsilon=2.0",
        name="privacy",
        registry=plugins.MECHANISMS,
    )
    embedding_noise: float = setting(
        1.0,
        "Sets the standard deviation of the Gaussian noise on the last layer.",
        example=f"{_EMBEDDINGS} embedding-noise=2.0",
        least=1e-6,
        symbol="c, in VAFL",
    )
    inner_noise: float = setting(
        0.0,
        "Sets the standard deviation of the uniform noise on the inner layers.",
        example=f"{_EMBEDDINGS} inner-noise=0.1",
        least=0,
    )
    embedding_bound: float = setting(
        1.0,
        "Clips the output of the last layer to this norm, before noise is added.",
        example=f"{_EMBEDDINGS} embedding-bound=2.0",
        least=1e-6,  # far from where numbers of 32 bits, and noise with them, become zero
        symbol="R",
    )
    clip: float = setting(
        1.0,
        "Clips a row's loss difference to [-C, C].",
        example="strategy='dpzv' clip=0.5",
        above=0,
        symbol="C, in DPZV",
    )
    epsilon: float | None = basic(
        None,
        "Sets the privacy budget of a run with noise on labels or on scalars. Noise on scalars "
        "keeps the budget at `delta`. In an explanation, it is the budget of the figures for "
        "parties: 1 by default.",
        example="privacy='labels' epsilon=2.0",
        auto="the system's, or none.",
        above=0,
        symbol="epsilon",
    )
    delta: float | None = setting(
        None,
        "Sets the delta of the budget (epsilon, delta).",
        example="strategy='dpzv' epsilon=1.0 delta=0.0001",
        auto="1e-5, or 0.1 over the training rows if that is less.",
        above=0,
        below=1,
        symbol="delta",
    )
    top_clip: float = setting(
        0.5,
        "Clips a row's gradient of the top model to this norm, with noise on scalars.",
        example="strategy='dpzv' top-clip=1.0",
        above=0,
    )
    noise_multiplier: float | None = setting(
        None,
        "Sets the noise on the mean scalar of U rows, as a multiple of C / U.",
        example="strategy='dpzv' noise-multiplier=2.0",
        auto="calibrated to epsilon, delta and the length of the run.",
        least=0,
    )
    calibration: str = setting(
        "known",
        "Chooses how noise is calibrated to the budget. `known` assumes that parties know the "
        "mini-batches, which is true here. `secret` assumes secret mini-batches, by "
        "dp-accounting's PLD accountant. `paper` uses DPZV's formula and adds no noise to the top "
        "model. `secret` and `paper` need sampling='poisson'. The results state the guarantee "
        "that holds.",
        example="strategy='dpzv' calibration='secret' sampling='poisson'",
        choices=("known", "secret", "paper"),
    )
    noise_seed: int = setting(
        -1,
        "Chooses secret or repeatable randomness: -1 keeps it secret. It covers noise, "
        "directions, Poisson mini-batches and, with files:, the first models. It also covers the "
        "order of partial rows. Use 0 or more in experiments only.",
        example="strategy='cascaded' noise-seed=0",
        least=-1,
    )
