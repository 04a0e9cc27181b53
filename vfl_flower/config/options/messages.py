"""Options of the schedule and of compressed messages."""

from __future__ import annotations

from dataclasses import dataclass

from vfl_flower.config import plugins
from vfl_flower.config.options.option import key


@dataclass(frozen=True)
class ScheduleConfig:
    """Quorum, windows, delays, and the rows of a step."""

    quorum: int | None = key(
        None,
        "Sets how many uploads the label holder waits for. All parties is synchronous, 1 is "
        "asynchronous.",
        example="strategy='vafl-t' quorum=2",
        basic=True,
        auto="the system's own.",
        least=1,
        symbol="t, in VAFL",
    )
    window: int | None = key(
        None,
        "Sets how many steps of a party one message exchange carries. Large windows save round "
        "trips and make embeddings staler.",
        example="window=8",
        auto="1 in process, and in runs of at most 64 steps an epoch. Else it starts at 1, grows, "
        "and shrinks when the loss jumps. It grows to at most 8 under Ray and 32 over streams, but "
        "no longer than measured times make worthwhile. Over messages between nodes it grows to 16 "
        "in small runs too. Zeroth order: 16 in place of 1, and at most 64.",
        least=1,
    )
    sampling: str = key(
        "shuffle",
        "Chooses how mini-batches are drawn. `shuffle` slices a shuffled epoch. `poisson` takes "
        "each row with probability batch-size / rows. `replacement` draws each mini-batch from all "
        "rows, as the papers do.",
        example="sampling='poisson'",
        expert=True,
        registry=plugins.SAMPLINGS,
    )
    max_delay: int = key(
        0,
        "Limits the age of an embedding that the label holder uses, in label-holder steps. 0 sets "
        "no limit.",
        example="strategy='vafl' max-delay=20",
        expert=True,
        least=0,
        symbol="D, in VAFL",
    )
    delay: str = key(
        "none",
        "Simulates delays on the virtual clock of the in-process engine. `poisson` and "
        "`exponential` follow VAFL's appendix G. `straggler` makes one party 20 to 60 % slower "
        "(AsyREVEL).",
        example="strategy='vafl' delay='exponential'",
        expert=True,
        choices=("none", "poisson", "exponential", "straggler"),
    )


@dataclass(frozen=True)
class CodecConfig:
    """How one direction of a party's link is compressed.

    Options of the downlink have the prefix ``downlink-``.
    """

    codec: str = key(
        "identity",
        "Chooses how parties compress the embeddings that they upload. `top-k` keeps the largest "
        "entries. `qsgd` rounds entries at random. `float16` and `bfloat16` use 2 bytes.",
        example="codec='top-k'",
        basic=True,
        registry=plugins.CODECS,
    )
    keep: float | None = key(
        None,
        "Sets the share of a mini-batch's entries that top-k keeps.",
        example="codec='top-k' keep=0.05",
        auto="0.1",
    )
    bits: int | None = key(
        None,
        "Sets the bits of a number. qsgd has 2^bits levels, and 1 to 16 bits. top-k has 16, or 32 "
        "for exact values.",
        example="codec='qsgd' bits=3",
        expert=True,
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
