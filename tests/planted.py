"""Plausible faults, each planted in a copy of the code, and the test that finds it.

`python -m tests.planted` plants one after the other, and prints which of them a test finds. Each
test is one of those that `make test` runs. A fault is a text of the code that occurs once, so that
it moves with the code, and a text in its place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).parent.parent
PRODUCT = ("vfl_flower", "strategies")


class Fault(NamedTuple):
    """A fault: what it does, the text that it replaces, its own text, and the test."""

    about: str
    text: str
    planted: str
    test: str


FAULTS = (
    Fault(
        "a row asked several times in one upload counts once",
        'ledger.numbers("uploads", different) + often * times',
        'ledger.numbers("uploads", different) + times',
        "party/test_limits.py::test_a_row_that_one_upload_has_several_times_counts_as_often",
    ),
    Fault(
        "max-epochs allows one step too many",
        "steps > self.epochs * of_epoch:",
        "steps > self.epochs * of_epoch + 1:",
        "party/test_limits.py::test_epochs_end_whatever_the_orders_say",
    ),
    Fault(
        "a clock that is set back starts a new day of asked ids",
        "return max(today(), *(ledger.last(name) for name in names))",
        "return today() if names else 0",
        "party/test_asked_ids.py::test_the_rate_of_a_day",
    ),
    Fault(
        "max-ids allows one id too many",
        "(limit.most - ledger.count(",
        "(limit.most + 1 - ledger.count(",
        "party/test_asked_ids.py::test_an_id_that_was_asked_about_before_is_free",
    ),
    Fault(
        "all parties draw equal rows",
        "self.config.training.seed, 2, stream, epoch",
        "self.config.training.seed, 2, 0, epoch",
        "test_batches.py::test_mini_batches_with_replacement_differ_between_all_that_name_them",
    ),
    Fault(
        "a secret mini-batch may have a row twice",
        "if len(np.unique(places)) < len(places):",
        "if not len(places) and steps:",
        "test_batches.py::test_what_a_party_says_of_its_mini_batches_is_a_window_or_refused",
    ),
    Fault(
        "the ids of another party's mini-batches are accepted",
        "if not np.array_equal(ids, window.ids):",
        "if len(ids) != len(window.ids):",
        "test_faults.py::test_each_fault_is_told_in_a_sentence_and_the_run_goes_on_until_the_party_is_back",
    ),
    Fault(
        "a party that answered more than the checkpoint knows resumes",
        'if is_older or (seat["alive"] and state.exchange != seat["exchange"]):',
        "if is_older:",
        "test_states.py::test_a_state_of_another_exchange_or_checkpoint_is_refused",
    ),
    Fault(
        "a token file that the group can read is accepted",
        "if not is_secret(self.path):",
        "if self.path.stat().st_mode & 0o004:",
        "test_serving.py::test_files_of_tokens_that_are_not_safe_are_refused",
    ),
    Fault(
        "max-delay is off by one",
        "used_at - written > self.max_delay",
        "used_at - written > self.max_delay + 1",
        "test_label_holder.py::test_an_embedding_serves_until_it_is_older_than_max_delay_and_no_longer",
    ),
    Fault(
        "a stream's token is accepted twice",
        "self._tokens.pop(shown, None)",
        "self._tokens.get(shown)",
        "stream/test_strangers.py::test_a_token_serves_one_call",
    ),
    Fault(
        "a reply to another message is taken",
        "elif link.in_flight and said.reply_to_message_id == link.in_flight.key:",
        "elif link.in_flight:",
        "stream/test_strangers.py::test_a_reply_counts_from_its_party_and_to_the_message_that_waits",
    ),
    Fault(
        "scalars get half of their noise",
        "on_grid(scalar, self.multiplier * bound * self._drawn(1), bound)",
        "on_grid(scalar, self.multiplier * bound / 2 * self._drawn(1), bound)",
        "test_scalar_privacy.py::test_scalars_get_gaussian_noise_by_the_rows_they_are_means_of",
    ),
    Fault(
        "noise is calibrated to an added row, not to a changed label",
        "self.multiplier = 2 * self.most**0.5 / mu",
        "self.multiplier = self.most**0.5 / mu",
        "test_scalar_privacy.py::test_noise_is_calibrated_to_all_that_a_run_releases",
    ),
    Fault(
        "releases of parties in step count as one party's",
        "together = parties > 1 and quorum == parties",
        "together = parties > 1 and quorum == 1",
        "test_scalar_privacy.py::test_noise_is_calibrated_to_all_that_a_run_releases",
    ),
    Fault(
        "labels keep their classes more often than epsilon allows",
        "kept_share(self.epsilon, len(names))",
        "kept_share(1.2 * self.epsilon, len(names))",
        "test_label_noise.py::test_a_label_is_kept_by_the_chance_of_randomised_response",
    ),
    Fault(
        "a changed label is always the next class",
        "shift = 1 + (self._words[:, 1] % np.uint64(len(order) - 1)).astype(np.int64)",
        "shift = 1 + (self._words[:, 1] % np.uint64(1)).astype(np.int64)",
        "test_label_noise.py::test_a_label_is_kept_by_the_chance_of_randomised_response",
    ),
    Fault(
        "a mask is used twice",
        "if name in self._used:",
        "if name in self._used and self.parties == 1:",
        "test_secure_sum.py::test_what_a_block_says_alone_is_nothing",
    ),
    Fault(
        "different pair keys pass the comparison of tags",
        "(sent[one][other] != sent[other][one]).any()",
        "(sent[one][other] != sent[one][other]).any()",
        "test_secure_attacks.py::test_who_has_another_configuration_has_no_keys_in_common",
    ),
    Fault(
        "a signed key of an earlier run is accepted",
        'f"{run}|{party}|{parties}|".encode()',
        'f"{party}|{parties}|".encode()',
        "test_secure_attacks.py::test_keys_of_another_run_place_or_signature_are_refused",
    ),
    Fault(
        "a point outside the group is blinded",
        "refused = int(points[rows, 31].max() > 127)",
        "refused = 0",
        "test_psi.py::test_an_element_has_no_second_encoding",
    ),
    Fault(
        "a journal restored from a backup is accepted",
        "        if mark and self.lost:",
        "        if mark and self.lost > 9:",
        "test_checkpoint.py::test_a_run_that_is_restored_to_an_earlier_time_is_not_gone_on_with",
    ),
    Fault(
        "qsgd lacks the factor that makes it contractive",
        "unit = (norms / (self.levels * tau))",
        "unit = (norms / (self.levels * np.ones_like(tau)))",
        "test_codecs.py::test_qsgd_is_contractive_in_expectation_and_unbiased_up_to_tau",
    ),
    Fault(
        "an upload that answers an earlier message is taken",
        "(upload.party, upload.exchange) != (record.party, record.exchange)",
        "upload.party != record.party",
        "strategy/test_messenger.py::test_an_answer_with_another_number_or_of_another_party_is_refused",
    ),
    Fault(
        "a party takes the steps of the others at the end",
        "self.per_epoch - first, self.left // share)",
        "self.per_epoch - first, self.left)",
        "strategy/test_step_budget.py::test_parties_abreast_are_ordered_the_same_steps_whatever_a_budget_leaves",
    ),
    Fault(
        "a failed party is waited for before a window is chosen",
        "for record in self._records if record.alive]\n        if any(len(of",
        "for record in self._records]\n        if any(len(of",
        "strategy/test_adaptive_window.py::test_a_party_that_fails_before_it_was_measured_is_not_waited_for",
    ),
    Fault(
        "a warm start tests on rows that trained its model",
        "0.5 * is_new + 2 * (by_learnt == 1)",
        "0.5 * is_new",
        "test_new_parties.py::test_rows_that_trained_a_model_choose_the_next_rather_than_test_it",
    ),
    Fault(
        "rows of validation are trained on where data have a test part of their own",
        "train_ids, validation_ids = np.flatnonzero(~chosen), np.flatnonzero(chosen)",
        "train_ids, validation_ids = np.arange(rows), np.flatnonzero(chosen)",
        "test_validation.py::test_a_separate_test_part_stays_whole",
    ),
    Fault(
        "a mean over present parties leaves out the label holder",
        "(self.present(h).sum(1, keepdim=True) + own).clamp_min(1)",
        "self.present(h).sum(1, keepdim=True).clamp_min(1)",
        "test_partial_rows.py::test_a_mean_is_over_the_present_parties_and_the_label_holders_own_block",
    ),
    Fault(
        "min-embedding-noise ignores the bound of embeddings",
        "if not mechanism.relative_noise >= least:",
        "if not privacy.embedding_noise >= least:",
        "party/test_rules.py::test_a_run_that_breaks_a_rule_is_refused_at_both_ends_whatever_comes_first",
    ),
    Fault(
        "a caller has one call too many under way",
        "self._under_way[key, call] >= AT_ONCE",
        "self._under_way[key, call] > AT_ONCE",
        "test_gate.py::test_a_key_has_few_calls_of_a_kind_at_once",
    ),
)


def places(fault: Fault) -> list[Path]:
    """Return the files that have the text of a fault, a file as often as it has the text."""
    files = (path for name in PRODUCT for path in (CHECKOUT / name).rglob("*.py"))
    return [path for path in files for _ in range(path.read_text().count(fault.text))]


def is_found(fault: Fault, folder: Path) -> bool:
    """Plant a fault in a copy of the checkout in a new folder, and return whether its test fails.

    Raises
    ------
    RuntimeError
        If the test cannot run.
    """
    (place,) = places(fault)
    for name in (*PRODUCT, "tests"):
        shutil.copytree(CHECKOUT / name, folder / name)
    shutil.copy2(CHECKOUT / "pyproject.toml", folder)
    copy = folder / place.relative_to(CHECKOUT)
    copy.write_text(place.read_text().replace(fault.text, fault.planted))
    words = [
        "-q",
        "-x",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-m",
        "not nightly",
        f"tests/{fault.test}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{fault.test} did not run: {done.stdout[-2000:]}")
    return done.returncode == 1


def main() -> None:
    """Plant all faults, and print which are found."""
    found = 0
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            hit = is_found(fault, Path(folder))
        found += hit
        print("found    " if hit else "NOT FOUND", fault.about, flush=True)
    print(f"{found} of {len(FAULTS)} faults are found.")


if __name__ == "__main__":
    main()
