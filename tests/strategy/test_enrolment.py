"""Enrolment: parties that do not fit are refused."""

import re
from dataclasses import replace
from typing import Any

import pytest

from strategies.enrolment import check
from tests.strategy.parts import FITS, LABELS
from vfl_flower.config.errors import ConfigError
from vfl_flower.protocol.systems import resolve


def test_a_party_that_fits_takes_part() -> None:
    check(FITS, resolve({}), LABELS, 3)


@pytest.mark.parametrize(
    ("keys", "sizes", "sentence"),
    [
        ({}, {}, ""),
        ({"combine": "sum"}, {}, "and the run configuration gives 32. A sum or a mean of"),
        ({"top-model": "sum"}, {}, "and the run configuration gives 1. A sum or a mean of"),
        ({"labels": "shared"}, {}, "and the run configuration gives 32. A sum or a mean of"),
        ({}, {1: 16}, ""),
        ({}, {1: 8}, "where the run began with 8: set its embedding-size to 8"),
    ],
)
def test_embeddings_of_another_size_need_a_top_model_that_reads_them_side_by_side(
    keys: dict[str, Any], sizes: dict[int, int], sentence: str
) -> None:
    other = replace(FITS, embedding_size=16)
    if not sentence:
        check(other, resolve(keys), LABELS, 3, sizes)
        return
    with pytest.raises(ConfigError, match=f"Party 1 has embeddings of size 16, {sentence}"):
        check(other, resolve(keys), LABELS, 3, sizes)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"parties": 4},
            "Party 1 (5 columns) was started as one of 4 parties, but there are 3 nodes: give all "
            "the same num-partitions, and start as many.",
        ),
        (
            {"train_rows": 7},
            "Party 1 has 7 training and 2 test rows, the label holder 6 and 2: align them first.",
        ),
        (
            {"test_rows": 0},
            "Party 1 has 6 training and 0 test rows, the label holder 6 and 2: align them first.",
        ),
        (
            {"alignment": "another"},
            "Party 1 has other sample ids than the label holder, or in another order: align them "
            "first.",
        ),
        (
            {"embedding_size": 16},
            "Party 1 has embeddings of size 16, and the run configuration gives 32. A sum or a "
            "mean of embeddings, or labels = 'shared', needs equal sizes: leave the party's "
            "embedding-size out, or set combine = 'concat'.",
        ),
    ],
    ids=lambda each: str(next(iter(each))) if isinstance(each, dict) else "",
)
def test_a_party_that_does_not_fit_is_refused_with_a_sentence(
    change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        check(replace(FITS, **change), resolve({"combine": "mean"}), LABELS, 3)
