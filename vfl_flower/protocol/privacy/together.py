"""The epsilon that several runs on the same people have spent together.

Noise on scalars or embeddings is Gaussian. All releases of a run are one Gaussian mechanism of mu,
which the run's summary holds as ``gaussian_mu``. Runs of mu_1, mu_2, ... are one Gaussian mechanism
of sqrt(mu_1^2 + mu_2^2 + ...) (Dong et al., 2022). Noise on labels is drawn once. The epsilon of
such a run is the sum over all draws so far, so the largest epsilon counts. It adds to the epsilon
of the Gaussian mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vfl_flower.protocol.privacy.gaussian import epsilon_of


@dataclass(frozen=True)
class Claim:
    """An epsilon that one run or several claim to have spent.

    ``mu`` is of one Gaussian mechanism. A ``drawn`` epsilon already sums earlier runs' draws.
    """

    protects: str
    epsilon: float
    delta: float
    mu: float | None = None
    drawn: bool = False
    runs: int = 1

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> Claim | None:
        """Return the claim of a ``summary.json``, or None. The file may hold anything."""
        epsilon, delta = (_number(summary.get(key)) for key in ("epsilon", "delta"))
        if epsilon is None or delta is None or summary.get("distilled"):  # of a run that counts
            return None
        config, seeds = summary.get("config"), summary.get("seeds")
        drawn = isinstance(config, Mapping) and config.get("privacy") == "labels"
        runs = len(seeds) if isinstance(seeds, list) else 1
        mu, protects = _number(summary.get("gaussian_mu")), str(summary.get("epsilon_protects", ""))
        return cls(protects, epsilon, delta, mu, drawn, runs)

    def figures(self) -> dict[str, Any]:
        """Return the figures of a summary of these runs."""
        mu = {} if self.mu is None else {"gaussian_mu": self.mu}
        return {"epsilon": self.epsilon, "delta": self.delta, **mu}

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON; `Claim(**fields)` restores the claim."""
        return asdict(self)


def in_words(claim: Claim) -> str:
    """Return one sentence about the runs of a claim."""
    return (
        f"{claim.runs} runs together: epsilon {claim.epsilon:.3g} at delta {claim.delta:g}; it "
        f"protects {claim.protects}."
    )


def of_several(summaries: Iterable[Mapping[str, Any]]) -> list[Claim]:
    """Compose the claims of summaries; return the claims of two runs or more."""
    found = together(claim for each in summaries if (claim := Claim.of(each)))
    return [claim for claim in found if claim.runs > 1]


def together(claims: Iterable[Claim]) -> list[Claim]:
    """Compose the claims that protect the same data."""
    by_protected: dict[str, list[Claim]] = {}
    for each in claims:
        by_protected.setdefault(each.protects, []).append(each)
    return [_composed(each) for each in by_protected.values()]


def _composed(claims: list[Claim]) -> Claim:
    drawn = [each for each in claims if each.drawn]
    # The least delta counts of Gaussian releases. Epsilons and deltas of other kinds add up.
    gaussian = [(each.mu, each.delta) for each in claims if not each.drawn and each.mu is not None]
    others = [each for each in claims if not each.drawn and each.mu is None]
    epsilon = max((each.epsilon for each in drawn), default=0.0)
    epsilon += sum(each.epsilon for each in others)
    delta = sum(each.delta for each in others) + max((each.delta for each in drawn), default=0.0)
    mu = None
    if gaussian:
        at = min(delta for _, delta in gaussian)
        mu = math.hypot(*(each for each, _ in gaussian))
        epsilon, delta = epsilon + epsilon_of(mu, at), delta + at
    pure = mu if not drawn and not others else None
    return Claim(
        claims[0].protects,
        epsilon,
        delta,
        pure,
        len(drawn) == len(claims),
        sum(each.runs for each in claims),
    )


def _number(value: Any) -> float | None:
    """Return the value if it is a number of at least 0, small enough to compose."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e100 and math.isfinite(value) else None
