"""Every option: its default, its type, its range, and the sentence when it is wrong."""

import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import options
from tests.conftest import ALL_ROWS, MANY, Start
from vfl_flower.config import run_config
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.plugins import SYSTEMS
from vfl_flower.config.run_config import flower_defaults
from vfl_flower.label_holder.earlier_run import configured
from vfl_flower.launch.engines import run_local
from vfl_flower.models.bottoms import build_bottom
from vfl_flower.party.party import Party
from vfl_flower.protocol.codecs import channel
from vfl_flower.protocol.system import System
from vfl_flower.protocol.systems import resolve, sized
from vfl_flower.transport.stream.listen import host_and_port, port_range

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
PRESET = System("preset", "with defaults of its own", defaults={"party-lr": 0.003, "batch-size": 7})


def test_pyproject_has_every_key_in_the_table_that_is_generated() -> None:
    text = PYPROJECT.read_text()
    assert options.with_table(text) == text, "run python -m tests.options"
    told, defaults = tomllib.loads(text)["tool"]["flwr"]["app"]["config"], flower_defaults()
    assert repr(told) == repr(defaults)  # types and order too
    assert resolve(defaults) == resolve({})


def test_a_default_of_flowers_table_is_no_option_that_a_user_gave(tmp_path: Path) -> None:
    """Else a warm start from a VAFL run would become split learning."""
    keys = {"dataset": "breast-cancer", "strategy": "vafl", "epochs": 1, "batch-size": 200}
    run_local(2, {**keys, "out": str(tmp_path)})
    sent = {**flower_defaults(), "grow": str(tmp_path), "dataset": "breast-cancer"}
    given = run_config.given_to_flower(sent, {"grow", "dataset"})
    assert given == {"grow": str(tmp_path), "dataset": "breast-cancer"}
    assert configured(given).strategy == "vafl"
    assert configured(sent).strategy == "split-nn"  # the control
    named = run_config.given_to_flower(sent, {"grow", "dataset", "strategy"})
    assert configured(named).strategy == "split-nn"
    edited = run_config.given_to_flower({**sent, "strategy": "ef-vfl"}, {"grow", "dataset"})
    assert edited["strategy"] == "ef-vfl"  # in pyproject.toml


def test_every_field_of_every_section_is_a_key() -> None:
    config, found = run_config.RunConfig(), set()
    for spec in fields(config):
        value = getattr(config, spec.name)
        nested = is_dataclass(value) and not isinstance(value, type)
        found |= {(spec.name, own.name) for own in fields(value)} if nested else {("", spec.name)}
    assert found == {(each.section, each.field) for each in run_config.KEYS.values()}


def test_unknown_key_unlike_any_other_gets_no_suggestion() -> None:
    with pytest.raises(ConfigError) as error:
        resolve({"zzz": 1})
    assert "Did you mean" not in str(error.value)
    assert "vfl list" in str(error.value)


WRONG_TYPES: dict[str, dict[str, list[Any]]] = {
    "a whole number": {"epochs": ["3", 1.5, True], "quorum": ["all"]},
    "a number": {"party-lr": ["0.1", False]},
    "a finite number": {
        **{"party-lr": [float("nan")], "server-lr": [float("inf")], "delta": [float("nan")]},
        "regulariser-weight": [float("-inf")],
    },
    "a text": {"label": [1], "strategy": [3]},
}


@pytest.mark.parametrize("kind", WRONG_TYPES)
def test_wrong_type_is_refused(kind: str) -> None:
    for key, values in WRONG_TYPES[kind].items():
        for value in values:
            with pytest.raises(ConfigError, match=f"^{key} = .* must be {kind}"):
                resolve({key: value})


def test_a_whole_number_passes_for_a_number_unless_it_is_too_large_for_a_float() -> None:
    assert resolve({"party-lr": 1}).training.party_lr == 1.0
    with pytest.raises(ConfigError, match="party-lr"):
        resolve({"party-lr": 10**400})
    for value in (1e308, -1e308, 1e38):
        sentence = r"must be (below 1e\+38|at least 0)\.$"
        with pytest.raises(ConfigError, match=sentence):
            resolve({"server-lr": value})
    resolve({"epochs": 1})
    for same_hash in (True, 1.0):  # after an equal value of the right type
        with pytest.raises(ConfigError, match="whole number"):
            resolve({"epochs": same_hash})


OUT_OF_RANGE: list[tuple[float, str]] = [
    (0, "window quorum embedding-size batch-size epochs local-steps bottom-hidden top-hidden"),
    (-1, "batch-size local-steps max-delay parties seed"),
    (-2, "noise-seed"),
    (0.0, "embedding-noise embedding-bound party-timeout session-seconds delta mu clip epsilon"),
    (-1.5, "session-seconds clip epsilon"),
    (-0.1, "party-lr server-lr regulariser-weight inner-noise delta mu"),
    (-0.2, "test-fraction validation-fraction"),
    (-0.5, "noise-multiplier eval-every"),
    (1.0, "test-fraction delta validation-fraction"),
]


@pytest.mark.parametrize(("value", "keys"), OUT_OF_RANGE)
def test_value_out_of_range_is_refused(value: float, keys: str) -> None:
    for key in keys.split():
        with pytest.raises(ConfigError, match=f"^{key} = {value} must "):
            resolve({key: value})


def test_unknown_choice_is_refused_with_the_choices() -> None:
    for key in (key for key, each in run_config.KEYS.items() if each.names):
        with pytest.raises(ConfigError, match=f"^{key} = 'nonsense'") as error:
            resolve({key: "nonsense"})
        assert all(choice in str(error.value) for choice in run_config.KEYS[key].names), key


def test_auto_is_accepted_of_every_key_and_is_its_default() -> None:
    for key in run_config.KEYS:
        config = resolve({key: "auto"})
        assert sized(config, MANY).values()[key] == run_config.KEYS[key].default, key
        assert config == resolve({})
    # A key without a default says what decides it.
    assert all(each.auto for each in run_config.KEYS.values() if each.default is None)


def test_a_system_may_have_defaults_which_a_user_may_override(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SYSTEMS.known, "preset", "tests.config.test_config:PRESET")
    as_flower_sends_it = {**flower_defaults(), "strategy": "preset", "batch-size": 9}
    found = sized(resolve(as_flower_sends_it), MANY).training
    assert (found.party_lr, found.batch_size, found.server_lr) == (0.003, 9, 0.2)


VAFL, CASCADED, DPZV = ({"strategy": name} for name in ("vafl", "cascaded", "dpzv"))
HIDDEN = {"privacy": "labels", "epsilon": 1.0}
USUAL = (60, 10.0, 1e-3, 1e-3), (60, 5.0, 5e-4, 5e-4)
BY_ROWS = [
    # keys; epochs, patience and both rates of many rows, and of few
    ({}, *USUAL),
    ({"validation-fraction": 0.0}, (20, 10.0, 1e-3, 1e-3), USUAL[1]),
    ({"optimizer": "sgd"}, (20, 10.0, 0.2, 0.2), (60, 20.0, 0.1, 0.1)),
    ({"epochs": 5, "server-lr": 0.3}, (5, 10.0, 0.2, 0.3), (5, 20.0, 0.1, 0.3)),
    ({"optimizer": "adam"}, *USUAL),
    ({"optimizer": "momentum"}, (20, 10.0, 0.02, 0.02), (60, 20.0, 0.02, 0.02)),
    (VAFL, *USUAL),
    ({**VAFL, "optimizer": "sgd"}, (20, 10.0, 0.05, 0.05), (60, 20.0, 0.05, 0.05)),
    (CASCADED, (20, 10.0, 0.002, 0.1), (60, 20.0, 0.002, 0.1)),
    ({**VAFL, "optimizer": "adamw"}, *USUAL),
    ({**CASCADED, "optimizer": "adam"}, (20, 10.0, 0.001, 0.002), (60, 20.0, 0.001, 0.002)),
    ({"presence": 0.5}, (60, 20.0, 1e-3, 1e-3), (60, 20.0, 5e-4, 5e-4)),
    ({"presence": 0.5, "optimizer": "sgd"}, (60, 20.0, 0.2, 0.2), (60, 20.0, 0.1, 0.1)),
    (HIDDEN, (20, 10.0, 5e-4, 5e-4), (60, 20.0, 5e-4, 5e-4)),
    # By differences: Adam too, at the system's own rates.
    ({**CASCADED, **HIDDEN}, (20, 10.0, 0.001, 0.002), (60, 20.0, 0.001, 0.002)),
    ({**DPZV, **HIDDEN}, (200, 10.0, 0.002, 0.002), (200, 20.0, 0.002, 0.002)),
]


@pytest.mark.parametrize(("keys", "many", "few"), BY_ROWS)
def test_what_is_not_given_of_training_follows_from_the_rows(
    keys: dict[str, Any], many: tuple[float, ...], few: tuple[float, ...]
) -> None:
    def at(rows: int) -> tuple[float, ...]:
        found = sized(resolve(keys), rows).training
        return found.epochs, found.patience, found.party_lr, found.server_lr

    assert at(999) == few and at(1000) == many
    again = sized(sized(resolve(keys), 999), 1000)
    assert again == sized(resolve(keys), 999)  # once known it stays


def test_a_warm_up_that_is_longer_than_the_epochs_that_follow_is_refused(tmp_path: Path) -> None:
    config = resolve({"warm-up": 30.0, "optimizer": "sgd"})
    assert sized(config, 999).training.warm_up == 30
    with pytest.raises(ConfigError, match="warm-up = 30 is longer than epochs = 20"):
        sized(config, 1000)
    keys = {"dataset": "digits", "warm-up": 70.0, "out": str(tmp_path / "out")}
    with pytest.raises(ConfigError, match="warm-up = 70 is longer than epochs = 60"):
        run_local(2, keys)
    assert not (tmp_path / "out").exists()


def test_masked_embeddings_are_linear_and_so_is_what_is_looked_at_without_masks() -> None:
    keys = {"aggregation": "secure", "combine": "mean", "bottom-model": "mlp"}
    config = resolve(keys)
    assert config.models.embedding_activation == "none"
    assert config.with_values({"aggregation": "plain"}).models.embedding_activation == "none"
    given = resolve({**keys, "embedding-activation": "relu"})
    assert given.models.embedding_activation == "relu"
    # Checkpoints of before have none written down, and their models were made with relu.
    older = run_config.RunConfig.of({**config.values(), "embedding-activation": None})
    for each, linear in ((config, True), (older, False)):
        h = build_bottom(each, 0, torch.zeros(5), 3)(torch.eye(5) * 9 - 4)
        assert bool((h < 0).any()) is linear


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["centralised", "split-nn", "local-only", "vafl"])
def test_a_run_tells_what_its_rows_decided_and_goes_by_it(run: Start, strategy: str) -> None:
    """For `alone` the epochs are of the best of its runs."""
    keys = {"dataset": "breast-cancer", "strategy": strategy, **ALL_ROWS, "eval-every": 20}
    keys["batch-size"] = 1000  # one step an epoch
    summary = run(2, keys).summary
    told = summary["config"]
    assert (told["epochs"], told["patience"], told["party-lr"]) == (60, 5.0, 5e-4)
    assert summary["epochs"] == 60


@pytest.mark.one_by_day
@pytest.mark.parametrize("strategy", ["centralised", "split-nn"])
def test_rates_of_ones_own_optimizer_follow_it(tmp_path: Path, strategy: str) -> None:
    """A party that names only an optimizer learns like a party that also names its rate."""

    def losses(own: dict[str, Any], name: str) -> list[float]:
        keys = {"dataset": "breast-cancer", "strategy": strategy, "epochs": 1}
        out = str(tmp_path / name)
        found = run_local(2, {**keys, "out": out}, node_configs=[own, {}])
        return [entry["test_loss"] for entry in found.history]

    given = {"optimizer": "sgd", "party-lr": 0.1}
    assert losses({"optimizer": "sgd"}, "a") == losses(given, "b") != losses({}, "c")


def test_every_default_that_a_system_prefers_is_of_a_key_that_may_be_auto() -> None:
    for name in SYSTEMS.names:
        for key, preferred in SYSTEMS.load(name).defaults.items():
            assert flower_defaults().get(key, "auto") == "auto"
            assert resolve({**flower_defaults(), "strategy": name}).values()[key] == preferred


def test_the_budget_of_a_system_is_taken_whole_or_given_whole() -> None:
    def budget(**given: Any) -> tuple[float | None, float | None, float | None]:
        keys = {key.replace("_", "-"): value for key, value in given.items()}
        config = resolve({"strategy": "dpzv", **keys})
        return config.privacy.epsilon, config.privacy.delta, config.privacy.noise_multiplier

    assert budget() == (1.0, None, None)
    assert budget(delta=1e-3) == (1.0, 1e-3, None)
    assert budget(epsilon=2.0) == (2.0, None, None)
    assert budget(epsilon=2.0, delta=1e-5) == (2.0, 1e-5, None)
    assert budget(noise_multiplier=3.0) == (None, None, 3.0)
    assert budget(noise_multiplier=3.0, delta=1e-4) == (None, 1e-4, 3.0)
    assert budget(noise_multiplier=3.0, epsilon=2.0, delta=1e-4) == (2.0, 1e-4, 3.0)
    assert budget(privacy="none") == (None, None, None)


SCALAR = {"privacy": "scalar", "estimator": "zeroth-order"}
BUDGET = {"epsilon": 1.0, "delta": 1e-3}
NOT_A_BUDGET = "^epsilon is the budget of privacy = 'labels' or 'scalar', and noise-multiplier"
NO_SCALARS = "^privacy = 'scalar' .* 'first-order' does not answer by scalars. .* "
NOT_FOR = "^calibration = '{}' is for sampling = '{}', but here sampling = '{}'"
ZEROTH = {"estimator": "zeroth-order"}
SHARED = {"strategy": "ef-vfl", "labels": "shared"}
SECRET = {**DPZV, "sampling": "poisson", "calibration": "secret"}
BEGIN = {"initial-surrogates": "embeddings"}
BEGINS = "^initial-surrogates = 'embeddings'"
NEW = "with labels = 'shared' begins with new models"
POISSON, PERTURBED = {"sampling": "poisson"}, {"privacy": "perturbed-embedding"}
OF_SHUFFLE = NOT_FOR.format("known", "shuffle", "poisson")
NOT_KNOWN = "^privacy = 'perturbed-embedding' does not know how often"
NO_RANGE = "^privacy = 'scalar' with target = 'regression' needs the lowest and the highest"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (SCALAR, "^privacy = 'scalar' needs a budget or a noise multiplier. Set epsilon"),
        ({"privacy": "scalar", **BUDGET}, f"{NO_SCALARS}or priv"),
        ({**DPZV, "estimator": "first-order", **BUDGET}, f"{NO_SCALARS}'zeroth-order'"),
        ({**CASCADED, "privacy": "scalar", **POISSON, **BUDGET}, OF_SHUFFLE),
        ({**PERTURBED, "sampling": "replacement"}, f"{NOT_KNOWN} sampling = 'replacement'"),
        ({**DPZV, **POISSON}, OF_SHUFFLE),
        *(
            ({**DPZV, "calibration": each}, NOT_FOR.format(each, "poisson", "shuffle"))
            for each in ("secret", "paper")
        ),
        (
            {**DPZV, "class-weights": "balanced"},
            "^class-weights = 'balanced' follows from all labels, and the noise of privacy",
        ),
        *(
            ({**SECRET, **other, "max-delay": 8}, "^max-delay = 8 asks parties for the rows of ea")
            for other in ({}, {"calibration": "paper"})
        ),
        ({**DPZV, "target": "regression"}, NO_RANGE),
        (BUDGET, NOT_A_BUDGET),
        ({**PERTURBED, **BUDGET}, NOT_A_BUDGET),
        ({"noise-multiplier": 1.0}, NOT_A_BUDGET),
        *(
            ({f"{end}codec": "top-k", f"{end}keep": keep}, f"^{end}keep = {keep} is not a share. ")
            for end in ("", "downlink-")
            for keep in (0.0, -0.1, 1.0001, 7.0)
        ),
        ({"strategy": "ef-vfl", "keep": 0.0}, "^keep = 0.0 is not a share. Give a number above 0"),
        ({"keep": 0.5}, "^keep is for codec = 'top-k', and not for 'identity'. Leave it out"),
        ({"codec": "qsgd", "keep": 0.5}, "^keep is for codec = 'top-k', and not for 'qsgd'"),
        ({"bits": 2}, "^bits is for codec = 'qsgd' or 'top-k', and not for 'identity'"),
        *(
            ({"strategy": "cvfl", "bits": bits}, f"^bits = {bits} is not possible for top-k")
            for bits in (2, 17, 33)
        ),
        *(
            ({"codec": "qsgd", "bits": bits}, f"^bits = {bits} is not possible for qsgd")
            for bits in (-1, 0, 17)
        ),
        ({"downlink-keep": 0.5}, "^downlink-keep is for downlink-codec = 'top-k', and not for 'id"),
        ({"downlink-codec": "top-k", "downlink-bits": 2}, "^downlink-bits = 2 is not possible for"),
        ({"local-steps": 2}, "^local-steps = 2 needs labels = 'shared'"),
        *(
            ({**keys, **BEGIN}, f"{BEGINS} needs error feedback, and c")
            for keys in ({}, {"strategy": "cvfl"}, {"strategy": "ef-vfl", "codec": "identity"})
        ),
        ({**SHARED, **BEGIN, "grow": "runs/a"}, f"{BEGINS} {NEW}"),
        ({"strategy": "frozen", "codec": "top-k"}, "^strategy = 'frozen' is a baseline, which"),
        ({**SHARED, "strategy": "local-only"}, "^strategy = 'local-only' is a baseline, which"),
        ({"strategy": "ef-vfl", "local-steps": 2}, "^local-steps = 2 needs labels = 'shared'"),
        ({**SHARED, **ZEROTH}, "^labels = 'shared' is for first-order parties"),
        ({**CASCADED, "labels": "shared"}, "^labels = 'shared' is for first-order"),
        ({**DPZV, "downlink-codec": "qsgd"}, "^downlink-codec = 'qsgd' has nothing to"),
        ({**ZEROTH, "downlink-codec": "top-k"}, "^downlink-codec = 'top-k' has nothing to comp"),
        ({"top-model": "sum", "combine": "mean"}, "combine has no meaning"),
        ({"freeze": True}, "freeze is for the models of an earlier run"),
        ({**SHARED, "freeze": True, "grow": "x"}, "freeze does not work with labels = 'shared'"),
        ({"target": "regression", "labels": "shared"}, "labels = 'shared' is for classes"),
        ({"target": "regression", "class-weights": "balanced"}, "class-weights is for classes"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        resolve(given)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_a_system_s_codec_takes_its_own_keys() -> None:
    config = resolve({"strategy": "ef-vfl", "keep": 1})
    up = config.uplink
    assert (up.codec, up.keep, up.compression) == ("top-k", 1.0, "error-feedback")
    assert up.surrogates and not config.downlink.surrogates
    up = resolve({"strategy": "cvfl", "codec": "qsgd", "bits": 16}).uplink
    assert (up.codec, up.bits, up.compression) == ("qsgd", 16, "direct") and not up.surrogates
    assert not resolve({"strategy": "ef-vfl", "codec": "identity"}).uplink.surrogates


DOWN = {"downlink-codec": "qsgd", "downlink-compression": "error-feedback"}


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("given", "megabytes"),
    [
        ({"strategy": "ef-vfl"}, (2 + 2 * 1) * 0.05824),  # the table, and each party's own
        ({"strategy": "ef-vfl", **DOWN}, (2 * 2 + 2 * 2) * 0.05824),
        (SHARED, (2 + 2 * 2) * 0.05824),  # and the other party's
        ({**VAFL, "codec": "qsgd", "compression": "error-feedback"}, 4 * 0.05824),
    ],
    ids=str,
)
def test_surrogates_that_do_not_fit_into_memory_are_refused_with_a_sentence(
    run: Start, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], megabytes: float
) -> None:
    given = {**ALL_ROWS, "dataset": "breast-cancer", "epochs": 1, "window": 15, **given}
    monkeypatch.setattr(channel, "free_memory", lambda: 1e6 * megabytes)
    run(2, given)
    monkeypatch.setattr(channel, "free_memory", lambda: 1e6 * megabytes - 1)
    with pytest.raises(ConfigError) as error:
        run(2, given)
    sentence = str(error.value)
    assert sentence.startswith("Error feedback needs ") and sentence.endswith("fewer rows.")
    assert "\n" not in sentence
    monkeypatch.setattr(channel, "free_memory", lambda: 1000.0)
    with pytest.raises(ConfigError, match=r"Error feedback needs .* for this party's surrogates"):
        Party(resolve(given), 0, 2, 1)


def test_without_surrogates_memory_does_not_matter(
    run: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "free_memory", lambda: 0.0)
    run(2, {"strategy": "cvfl", "dataset": "breast-cancer", "epochs": 1, "window": 15})


NO_ADDRESS = ": a:b host: host:1:2 host:0 host:65536 host:99999999 ::x [::1 [::1]: []:9500"


def test_a_stream_address_has_a_host_and_perhaps_a_port() -> None:
    for address in ("", "host name", *NO_ADDRESS.split()):
        with pytest.raises(ConfigError, match=r"^stream-address = ") as error:
            resolve({"stream-address": address})
        assert repr(address) in str(error.value) and "\n" not in str(error.value)
    for address, parts in {
        **{each: (each, None) for each in ("localhost", "10.0.0.7", "fd00::12")},
        **{"labels.example.org:443": ("labels.example.org", 443), "[::1]": ("::1", None)},
        "[::1]:9500": ("::1", 9500),
    }.items():
        running = resolve({"stream-address": address}).running
        assert host_and_port(running.stream_address) == parts


NO_PORTS = "0 0-10 65536 9500-65536 9599-9500 9500- -9500 9500,9501 a-b 123456"


def test_stream_ports_are_one_or_a_range() -> None:
    for ports in ("", "9500 - 9599", *NO_PORTS.split()):
        with pytest.raises(ConfigError, match=r"^stream-ports = .* must be a port, or a ") as error:
            resolve({"stream-ports": ports})
        assert repr(ports) in str(error.value)
    assert port_range(resolve({"stream-ports": "9500"}).running) == range(9500, 9501)
    assert port_range(resolve({"stream-ports": "1-65535"}).running) == range(1, 65536)


KNOWN = "^privacy = 'scalar' needs secret mini-batches"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"strategy": "vafl-t", "quorum": 3}, "quorum = 3 is more than the 2 parties"),
        ({"max-delay": 2, "window": 4}, "window = 4 .* max-delay = 2"),
        ({"device": "abacus"}, "device = 'abacus'"),
        ({**SECRET, "quorum": 2}, f"{KNOWN}, .* all 2 parties know them: l"),
        ({**SECRET, **SCALAR, **BUDGET, "strategy": "syn-zoo", "calibration": "paper"}, KNOWN),
        (
            {**DPZV, **BUDGET, "epsilon": 0.01, "noise-multiplier": 2.0, "epochs": 1},
            "^The budget epsilon = 0.01 is already spent in one pass over the rows: noise",
        ),
        (
            {**DPZV, **BUDGET, "noise-multiplier": 0.0},
            "^The budget epsilon = 1 is already spent in one pass over the rows: noise-mul",
        ),
        ({"bottom-model": "binarised"}, "bottom-model = 'binarised' has no gradient"),
        ({**SHARED, **VAFL}, "^labels = 'shared' sends every upload on .* with a quorum of all 2"),
        ({**SHARED, "quorum": 1}, "^labels = 'shared' .* needs a synchronous system"),
    ],
)
def test_what_only_a_run_can_tell_is_refused_by_it(
    run: Start, given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(VflError, match=sentence):
        run(2, {"dataset": "breast-cancer", **given})


@pytest.mark.one_by_day
@pytest.mark.parametrize("parties", [3, 4])
def test_scalar_noise_is_counted_for_one_party_at_a_time_or_all(run: Start, parties: int) -> None:
    keys = {"dataset": "breast-cancer", "strategy": "dpzv", "epochs": 1}
    sentence = "^privacy = 'scalar' with quorum = 2 lets a row be in one step"
    with pytest.raises(ConfigError, match=sentence):
        run(parties, {**keys, "quorum": 2})
    for quorum in (1, parties):
        assert run(parties, {**keys, "quorum": quorum}).summary["epsilon"] == pytest.approx(1.0)
