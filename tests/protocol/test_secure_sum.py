"""Secure sums: the same model as without masks, by the same bytes; what cannot be is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Start, nightly
from tests.organisations import cancer, cut
from tests.strategy.test_checkpoint import assert_equal_runs, interrupted, resumed
from vfl_flower import client_app
from vfl_flower.config.errors import ConfigError, SumError, VflError
from vfl_flower.launch.engines import Finished, run_local
from vfl_flower.protocol.aggregation import masks as masking
from vfl_flower.protocol.aggregation.keys import RECORD
from vfl_flower.protocol.aggregation.masks import BOUND, Sum, from_fixed, places, to_fixed
from vfl_flower.protocol.systems import resolve

PARTIES = 3
SHORT: dict[str, Any] = {
    **{"dataset": "digits", "combine": "mean", "embedding-size": 8, "bottom-hidden": 16},
    **{"top-hidden": 16, "epochs": 2, "batch-size": 64, "noise-seed": 0},
    "embedding-activation": "relu",  # else a plain run has it, and a masked one none
}
JOINT: dict[str, Any] = {
    **{"estimator": "zeroth-order", "perturbs": "all", "party-lr": 0.01, "server-lr": 0.01},
    **{"bottom-model": "linear", "top-model": "linear"},
}


def largest_difference(one: Finished, other: Finished) -> float:
    """Of any parameter of any model."""
    names = ["top", *(f"party-{number}" for number in range(PARTIES))]
    return max(
        float(np.abs(mine - other.parameters(name)[key]).max(initial=0))
        for name in names
        if (one.folder / f"{name}.npz").exists()  # a sum has no parameters
        for key, mine in one.parameters(name).items()
    )


# --- the same model -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"combine": "sum", "window": 4, "optimizer": "adam", "party-lr": 0.01, "server-lr": 0.01},
        nightly({"top-model": "sum", "combine": "concat", "embedding-size": "auto"}),
        nightly({"downlink-codec": "float16", "downlink-compression": "error-feedback"}),
        nightly({"sampling": "poisson", "validation-fraction": 0.0}),
        nightly({"privacy": "labels", "epsilon": 3.0}),
        nightly({"privacy": "perturbed-embedding", "embedding-noise": 0.1}),
        {**JOINT, "strategy": "dpzv", "quorum": PARTIES, "epsilon": 20.0},
        nightly(JOINT),
        nightly({**JOINT, "differences": "two-sided", "server-update": "zeroth-order", "mu": 1e-5}),
        nightly({**JOINT, "strategy": "syn-zoo", "batch-size": 64}),
    ],
    ids=lambda keys: ", ".join(map(str, keys.values())) or "split-nn",
)
def test_the_model_is_that_of_a_plain_run(run: Start, keys: Mapping[str, Any]) -> None:
    plain = run(PARTIES, {**SHORT, **keys})
    secure = run(PARTIES, {**SHORT, **keys, "aggregation": "secure"})
    # Of 32-bit numbers' own last place, and more where noise has them learn little from much.
    assert largest_difference(plain, secure) < (5e-3 if keys.get("mu") else 5e-4)
    for key in ("test_accuracy", "steps", "best_epoch"):
        assert secure.summary[key] == pytest.approx(plain.summary[key], abs=1e-3), key
    assert secure.summary["bytes_down"] == plain.summary["bytes_down"]
    blocks = 2 if "perturbs" in keys else 1  # of an upload, with four zeros each
    zeros = 16 * blocks * plain.summary["exchanges"]
    assert secure.summary["bytes_up"] == plain.summary["bytes_up"] + zeros


@pytest.mark.nightly
def test_a_label_holders_own_columns_are_added_in_the_clear_at_its_side(tmp_path: Path) -> None:
    organisations = cut(tmp_path, cancer(rows=200), parties=PARTIES, own=6)
    keys = {**SHORT, "privacy": "none", **organisations.keys}
    plain = organisations.run("plain", keys)
    secure = organisations.run("secure", {**keys, "aggregation": "secure"})
    assert any(name.startswith("own.") for name in secure.parameters("top"))
    assert largest_difference(plain, secure) < 5e-4
    one, other = organisations.predict("plain"), organisations.predict("secure")
    np.testing.assert_array_equal(one["prediction"], other["prediction"])
    np.testing.assert_allclose(one["probability_1"], other["probability_1"], atol=1e-4)


# --- fixed point --------------------------------------------------------------------------------


@given(st.integers(2, 2000), st.integers(0, 2**32 - 1))
def test_a_sum_is_off_by_half_a_unit_of_each_party_at_most(parties: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    scale = generator.choice([1e-3, 1.0, 100.0, BOUND])
    rows = generator.uniform(-scale, scale, (parties, 4, 3)).astype(np.float32)
    rows = rows.clip(-np.float32(1023.9), np.float32(1023.9))
    of_all, added = Sum(parties), None
    for party, each in enumerate(rows):
        block = np.append(to_fixed(each, parties), np.zeros(4, np.int32))
        added = of_all.add(party, {"embedding": block}, (4, 3))
    assert added
    error = np.abs(added["embedding"] - rows.sum(0, dtype=np.float64))
    last_place = np.abs(rows.sum(0, dtype=np.float64)).max() * 2.0**-23
    assert error.max() <= parties * 2.0 ** -(places(parties) + 1) + last_place


@pytest.mark.parametrize("parties", [2, 3, 4, 5, 1000])
def test_the_largest_embeddings_have_a_sum_and_their_double_overflows(parties: int) -> None:
    most = np.full((2, 2), np.nextafter(np.float32(BOUND), np.float32(0)))
    fixed = to_fixed(most, parties)
    total = (fixed.astype(np.int64) * parties).astype(np.int32)
    np.testing.assert_allclose(from_fixed(total, parties), parties * BOUND, rtol=1e-4)
    np.testing.assert_allclose(from_fixed(-total, parties), -parties * BOUND, rtol=1e-4)
    with pytest.raises(SumError):
        from_fixed(np.full((2, 2), 2**30 + 1, np.int32), 2)


@pytest.mark.parametrize("wrong", [BOUND, -BOUND, 1e30, np.inf, np.nan])
def test_embeddings_beyond_the_range_are_refused_without_a_value(wrong: float) -> None:
    rows = np.zeros((3, 2), np.float32)
    rows[1, 1] = wrong
    with pytest.raises(VflError, match=r"^has embeddings beyond 1024, the bound of masked numbers"):
        to_fixed(rows, 3)


@pytest.mark.parametrize("zeros", [True, False], ids=["", "control"])
def test_no_number_is_small_enough_to_pass_for_a_sum(zeros: bool) -> None:
    """Masks that stay on one number leave a third to a half of all within a sum's range."""
    passed = 0
    for _ in range(100):
        of_all, masks = Sum(3), agreed_masks(3)
        blocks = [masks[0].hide({"embedding": np.full((1, 1), 2 * BOUND, np.float32)})]
        blocks += [each.hide({"embedding": np.ones((1, 1), np.float32)}) for each in masks[1:]]
        try:
            for party, block in enumerate(blocks):
                if not zeros:
                    block["embedding"][1:] = 0
                of_all.add(party, block, (1, 1))
            passed += 1
        except SumError:
            continue
    assert passed == 0 if zeros else 10 < passed < 65


def agreed_masks(parties: int) -> list[masking.Masks]:
    """Return the masks of parties that have agreed on keys."""
    privates = [X25519PrivateKey.generate() for _ in range(parties)]
    lasting = Ed25519PrivateKey.generate()
    offers = [masking.Offer.of(private, lasting, b"") for private in privates]
    found = [masking.agreed(each, n, offers, []) for n, each in enumerate(privates)]
    return [masking.Masks(n, keys, script) for n, (script, keys, _) in enumerate(found)]


def test_a_run_that_grows_beyond_the_range_ends_with_that_sentence(run: Start) -> None:
    keys = {**SHORT, "aggregation": "secure", "party-lr": 500.0, "server-lr": 500.0}
    with pytest.raises(VflError, match=r"cannot be added\. .* too large|no longer finite"):
        run(PARTIES, keys)


def test_what_a_block_says_alone_is_nothing() -> None:
    """Its numbers are even over all 32 bits; without masks they are not."""
    masks = agreed_masks(2)[0]
    rows = np.zeros((512, 128), np.float32)
    masked = masks.hide({"embedding": rows})["embedding"]
    bits = np.unpackbits(masked.view(np.uint8)).mean()
    assert abs(bits - 0.5) < 0.01  # 28 deviations
    assert len(np.unique(masked)) > 65_500 - 10
    with pytest.raises(VflError, match="two blocks 'embedding' alike"):
        masks.hide({"embedding": rows})


# --- what goes with it --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"combine": "concat"}, "'mlp' reads the parties' embeddings side by side"),
        ({"strategy": "centralised"}, "'centralised' is a baseline"),
        ({"labels": "shared"}, "labels = 'shared' sends"),
        ({"estimator": "zeroth-order"}, "or set perturbs = 'all'"),
        ({"codec": "top-k"}, "codec = 'top-k' has nothing to compress"),
        ({"codec": "qsgd", "compression": "error-feedback"}, "codec = 'qsgd' has nothing"),
        ({"presence": 0.5}, "if one party alone has a row"),
        ({"align": "any", "dataset": "files:a.csv"}, "if one party alone has a row"),
        ({"subsets": "sampled"}, "Leave out subsets"),
        ({"grow": "earlier"}, "Leave out grow"),
    ],
)
def test_what_needs_more_than_sums_is_refused_before_training(
    keys: Mapping[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=f"aggregation = 'secure' is not possible: .*{sentence}"):
        resolve({"combine": "mean", "aggregation": "secure", **keys})


@pytest.mark.parametrize(
    ("parties", "keys", "sentence"),
    [
        (1, {}, "a sum over one party hides nothing"),
        (3, {"strategy": "vafl"}, "set quorum to the number of parties"),
        (3, {"quorum": 2}, "do not step together"),
    ],
)
def test_so_are_parties_that_make_no_sum(
    run: Start, parties: int, keys: Mapping[str, Any], sentence: str
) -> None:
    with pytest.raises(VflError, match=sentence):
        run(parties, {**SHORT, "aggregation": "secure", **keys})


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{"window": 2}, nightly(JOINT)])
def test_a_run_that_is_cut_short_ends_as_if_it_had_not_been(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    keys = {"checkpoint-every": 9, **SHORT, **keys, "aggregation": "secure"}
    whole = run_local(PARTIES, {**keys, "out": str(tmp_path / "whole")})
    cut_short = interrupted(tmp_path / "cut", keys, after=2, parties=PARTIES)
    assert_equal_runs(resumed(cut_short, PARTIES), whole, PARTIES)


def test_no_file_of_a_run_holds_its_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    made = masking.Masks.__init__

    def remember(self: Any, party: int, keys: bytes, transcript: bytes) -> None:
        seen.extend(keys[at : at + 32] for at in range(0, len(keys), 32))
        made(self, party, keys, transcript)

    monkeypatch.setattr(masking.Masks, "__init__", remember)
    keys = {**SHORT, "aggregation": "secure", "checkpoint-every": 9}
    run_local(PARTIES, {**keys, "out": str(tmp_path / "run")})
    assert len(set(seen)) == 3  # of each pair, at both ends
    files = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(b"lineage" in each for each in files)
    assert not any(key in each for each in files for key in seen)
    assert not any(RECORD.encode() + b"\x12" in each for each in files)


# --- neither side's data are seen ---------------------------------------------------------------


@pytest.mark.nightly
def test_with_noise_on_labels_neither_sides_data_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The README's run: each has a file, parties insist on masks, labels are noisy."""
    for name in ("VFL_HOME", "XDG_STATE_HOME"):  # other tests draw labels of these people, too
        monkeypatch.setenv(name, str(tmp_path / "home"))
    organisations = cut(tmp_path, cancer(), parties=PARTIES)
    organisations.words = [{"aggregation": "secure"}] * PARTIES
    keys = {
        **organisations.keys,
        **{"aggregation": "secure", "combine": "mean", "privacy": "labels", "epsilon": 2.0},
        **{"epochs": 10, "embedding-size": 8, "bottom-hidden": 16, "top-hidden": 16},
    }
    uploads: list[np.ndarray[Any, Any]] = []

    class Listening(ClientApp):
        """Records the messages of party 0 to the label holder."""

        def __call__(self, message: Message, context: Context) -> Message:
            reply: Message = client_app.app(message, context)
            if context.node_config["partition-id"] == 0:
                for record in reply.content.array_records.values():
                    found = (each.numpy() for name, each in record.items() if name == "embedding")
                    uploads.extend(found)
            return reply

    finished = organisations.run("run", keys, Listening())
    assert finished.summary["epsilon"] == 2.0 and finished.summary["test_auc"] > 0.9
    assert uploads and all(each.dtype == np.int32 for each in uploads)
    bits = np.unpackbits(np.concatenate([each.ravel() for each in uploads]).view(np.uint8)).mean()
    assert abs(bits - 0.5) < 0.005
    said = organisations.predict("run")
    assert len(said) > 300
    with pytest.raises(VflError, match=r"Party 0 refuses aggregation = 'plain'"):
        organisations.run("plain", {**keys, "aggregation": "plain"})
