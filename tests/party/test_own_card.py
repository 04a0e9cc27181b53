"""A party's own card says what the party sent, its rows, its columns and its rules."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.conftest import nightly
from tests.organisations import Organisations, cut, small
from tests.strategy.test_checkpoint import Cut, cut_after
from vfl_flower.party.party import Party
from vfl_flower.protocol.privacy.embeddings import PerturbedEmbeddings
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.messages import Arrays, Upload

EPOCHS = {"epochs": 3, "checkpoint-every": 2}


def ran(folder: Path, **keys: Any) -> Organisations:
    organisations = cut(folder, small(), known=0.9)
    noisy = "privacy" in keys
    organisations.words = [{"name": "shop", **({} if noisy else {"monotonic": "f0:+"})}, {}]
    with cut_after(2), pytest.raises(Cut):
        organisations.run("a", {**EPOCHS, **keys})
    return organisations


def card(organisations: Organisations, party: int, ending: str = "md") -> str:
    found = (organisations.folder / "a").glob(f"run-*-party-{party}.card.{ending}")
    path = max(found, key=lambda each: each.stat().st_mtime_ns)  # a resumed run has another name
    assert not path.stat().st_mode & 0o077
    return path.read_text()


def item(text: str, name: str) -> str:
    found = re.search(rf"^\| {re.escape(name)} \| (.*) \|$", text, re.MULTILINE)
    assert found, (name, text)
    return found[1].replace("\\", "")


@pytest.mark.parametrize(
    "keys", [{}, nightly({"strategy": "asyrevel"}), {"privacy": "perturbed-embedding"}]
)
def test_a_card_counts_what_its_party_sent_through_an_interruption(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    sent: dict[int, int] = {0: 0, 1: 0}
    answer = Party._answer

    def counted(self: Party, arrays: Arrays) -> Upload:
        sent[self.learner.index] += sum(each.nbytes for each in arrays.values())
        return answer(self, arrays)

    with patch.object(Party, "_answer", counted):
        organisations = ran(tmp_path, **keys)
        before = dict(sent)
        organisations.resume("a")
    for party in (0, 1):
        text = card(organisations, party)
        told = int(item(text, "bytes of embeddings").replace(",", ""))
        # A party forgets what it sent after the checkpoint from which it resumes.
        assert before[party] / 3 < told <= sent[party]
        used = [int(item(text, f"rows, {which}")) for which in ("training", "validation and test")]
        assert sum(used) + int(item(text, "rows left out")) == 54
        uploads, epsilon = (
            item(text, each) for each in ("uploads of a row, at most", "epsilon of these uploads")
        )
        if "privacy" in keys:
            mechanism = PerturbedEmbeddings(resolve({**EPOCHS, **keys}))
            due = mechanism.epsilon_of_uploads(used[0], int(uploads))
            assert float(epsilon) == pytest.approx(due, rel=1e-3)
        else:
            assert epsilon.startswith("none") and int(uploads) >= 3


@pytest.mark.usefixtures("cards_in_html")
def test_a_card_is_complete_and_names_no_person(tmp_path: Path) -> None:
    organisations = ran(tmp_path)
    organisations.resume("a")
    first, second = card(organisations, 0), card(organisations, 1)
    assert item(first, "f0") == "the score rises with it" and item(first, "f1") == "free"
    assert item(first, "name") == "shop" and "## Rules" not in second
    assert "f0" not in second.replace(item(second, "run"), "") and item(second, "f2") == "free"
    assert "<h1>Card of party 1</h1>" in card(organisations, 1, "html")
    assert not re.search(r"\b10\d\d\b", first)  # ids of the table
    for text in (first, second):
        assert item(text, "began") <= item(text, "as of")
