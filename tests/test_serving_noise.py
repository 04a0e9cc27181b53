"""Noise on embeddings in the online service: fresh for each score, and counted for each row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.organisations import cancer, cut
from tests.serving import Served, serving, with_newcomers
from vfl_flower.transport.gather import gather
from vfl_flower.transport.messages import Scored, ScoreOrder

SHORT = {"epochs": 2, "bottom-model": "linear", "embedding-size": 4, "top-hidden": 8}
NOISE = {"privacy": "perturbed-embedding", "embedding-noise": 4.0}


def embedded(found: Served, *rows: int) -> NDArray[Any]:
    """Return the embeddings that party 0 uploads for these rows."""
    order = ScoreOrder(arrays={"rows": np.array(rows, np.int32)})
    node = found.node(0)
    return np.asarray(gather(found.grid, {node: order}, Scored, 30)[node].arrays["embedding"])


@pytest.mark.one_by_day
@pytest.mark.parametrize("seed", [{}, {"noise-seed": 0}], ids=["secret", "seed"])
@pytest.mark.parametrize("noise", [{}, NOISE], ids=["plain", "noise"])
def test_no_two_scores_have_the_same_noise(
    tmp_path: Path, noise: dict[str, Any], seed: dict[str, int]
) -> None:
    """Equal noise of two rows would vanish in their difference. The control is without noise."""
    organisations = cut(tmp_path, cancer(columns=6, rows=200), known=1.0)
    organisations.run("run", {**SHORT, **noise, **(seed if noise else {})})
    with serving(organisations, tmp_path) as found:
        found.service.queue.close()  # so that only this test uses the grid
        once, again = embedded(found, 0), embedded(found, 0)
        assert np.array_equal(once, again) == (not noise)
        first, second = embedded(found, 1), embedded(found, 2)
        together = embedded(found, 1, 2)
        alike = np.allclose(first - second, together[:1] - together[1:], atol=1e-4)
        assert alike == (not noise)


def test_each_release_of_a_row_counts_also_of_an_id_outside_the_alignment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))
    keys = {**SHORT, **NOISE, "subsets": "sampled"}
    organisations, (new, other, *_) = with_newcomers(tmp_path, keys)
    spent = []

    def ask(found: Served, *ids: int) -> None:
        for asked in ids:
            missing = {"0": "unknown", "1": "unknown"} if asked == -1 else {}
            assert found.ask(asked)[0]["missing"] == missing
            spent.append(found.http.get("/v1/model").json()["epsilon"])

    with serving(organisations, tmp_path) as found:
        (one,) = found.known()
        ask(found, new, other, one, new, one, new, -1, -1, -1, -1)  # nobody has id -1
    with serving(organisations, tmp_path) as found:
        ask(found, one, other)  # a restart forgets which row it was
    first, of_other, of_one, again, also, last, *of_nobody, restarted, _ = spent
    assert first == of_other == of_one < again == also < last < restarted
    assert of_nobody == [last] * 4
