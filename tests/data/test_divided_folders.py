"""The example of folders that are divided already: each party has its files' columns."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vfl_flower.api.training import train
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import load_features
from vfl_flower.protocol.systems import resolve

Array = NDArray[Any]
EXAMPLE = Path(__file__).parents[2] / "examples" / "divided_folders.py"
VERTIBENCH, MARS_VFL = f"{EXAMPLE}:vertibench", f"{EXAMPLE}:mars_vfl"
WIDTHS = (3, 1, 2)  # columns of each party: no even part


def config_of(dataset: str, **keys: Any) -> RunConfig:
    return resolve({"dataset": dataset, "validation-fraction": 0.0, **keys})


def rows_of(count: int, seed: int = 0) -> tuple[list[Array], Array]:
    generator = np.random.default_rng(seed)
    return [generator.normal(3, 2, (count, width)) for width in WIDTHS], np.arange(count) % 3


def write_csv(path: Path, x: Array, y: Array | None, form: str, ids: Array | None = None) -> None:
    """Write a party's file as VertiBench's `to_csv` does: of type "fedtree", or "raw"."""
    if form == "raw":
        assert y is not None
        np.savetxt(path, np.column_stack([x, y]), delimiter=",", fmt="%.6f")
        return
    names = ["id", *(["y"] if y is not None else []), *(f"x{i}" for i in range(x.shape[1]))]
    ids = np.arange(len(x)) if ids is None else ids
    columns = np.column_stack([ids, *([y] if y is not None else []), x])
    np.savetxt(path, columns, delimiter=",", fmt="%.6f", header=",".join(names), comments="")


Write = Callable[[Path, Array, Array], None]
FORMS: dict[str, Write] = {
    "csv": lambda path, x, y: write_csv(path, x, y, "fedtree"),
    "raw.csv": lambda path, x, y: write_csv(path, x, y, "raw"),
    "npz": lambda path, x, y: np.savez(path, X=x, y=y),
}


def vertibench(
    folder: Path, form: str = "csv", split: str = "party3-{}_imp_weight0.1_seed0", test: int = 12
) -> str:
    """Write a split with 30 training rows, and test rows if there are any."""
    kind = form.rpartition(".")[2]
    for part, count, seed in (("train", 30, 0), ("test", test, 1)):
        xs, y = rows_of(count, seed)
        for party, x in enumerate(xs if count else ()):
            FORMS[form](folder / f"toy_{split.format(party)}_{part}.{kind}", x, y)
    return f"{VERTIBENCH}:{folder}"


def check_columns(dataset: str, train_parts: list[Array], test_parts: list[Array]) -> None:
    """Check that each party has its own columns, rows in order, scaled by the training rows."""
    for party, (known, new) in enumerate(zip(train_parts, test_parts, strict=True)):
        block = load_features(config_of(dataset), party, len(train_parts))
        for rows, wanted in ((block.train, known), (block.test, new)):
            assert rows.shape == wanted.shape
            scaled = (wanted - known.mean(0)) / known.std(0)
            np.testing.assert_allclose(rows, scaled, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("split", ["party3-{}_imp_weight0.1_seed0", "party{}", "party3-{}"])
def test_each_party_has_the_columns_and_split_of_its_files(
    tmp_path: Path, form: str, split: str
) -> None:
    dataset = vertibench(tmp_path, form, split)
    check_columns(dataset, rows_of(30)[0], rows_of(12, 1)[0])
    labels = load_labels(config_of(dataset))
    assert labels.classes == (0, 1, 2)  # whole numbers, though the files have floats
    assert labels.train.tolist() == [0, 1, 2] * 10 and labels.test.tolist() == [0, 1, 2] * 4


def test_a_run_trains_and_reports_on_such_a_folder(tmp_path: Path) -> None:
    keys = {"dataset": vertibench(tmp_path), "epochs": 2, "validation-fraction": 0.0}
    (tmp_path / "toy_party3-0_imp_weight0.1_seed0_train.pkl").write_bytes(b"passed over")
    assert 0 <= train(keys, parties=3).summary["test_accuracy"] <= 1


def test_columns_of_one_name_are_all_read(tmp_path: Path) -> None:
    place = vertibench(tmp_path)
    for path in tmp_path.rglob("*party1-*.csv"):
        header, _, rows = path.read_text().partition("\n")
        names = ["x" if name.startswith("x") else name for name in header.split(",")]
        path.write_text(",".join(names) + "\n" + rows)
    assert load_features(config_of(place), 1, 3).train.shape[1] == WIDTHS[1]


def test_a_folder_without_test_files_is_split_at_random(tmp_path: Path) -> None:
    config = config_of(vertibench(tmp_path, test=0))
    labels, blocks = load_labels(config), [load_features(config, party, 3) for party in range(3)]
    assert (len(labels.train), len(labels.test)) == (24, 6)
    assert {block.ids_digest for block in blocks} == {labels.ids_digest}


def test_a_party_other_than_the_label_holder_needs_no_labels(tmp_path: Path) -> None:
    dataset = vertibench(tmp_path, test=0)
    x = rows_of(30)[0][2]
    write_csv(tmp_path / "toy_party3-2_imp_weight0.1_seed0_train.csv", x, None, "fedtree")
    config = config_of(dataset)
    assert load_features(config, 2, 3).train.shape == (24, 2)
    assert len(load_labels(config).train) == 24


def test_numbers_with_decimals_are_labels_of_a_regression(tmp_path: Path) -> None:
    for party, x in enumerate(rows_of(30)[0]):
        write_csv(tmp_path / f"toy_party3-{party}_train.csv", x, np.arange(30) / 4, "fedtree")
    labels = load_labels(config_of(f"{VERTIBENCH}:{tmp_path}", target="regression"))
    assert labels.classes == () and labels.train.dtype == np.float32


def test_one_of_several_splits_is_named_by_a_file(tmp_path: Path) -> None:
    dataset = vertibench(tmp_path)
    vertibench(tmp_path, split="party3-{}_corr_beta0.6_seed0")
    with pytest.raises(ConfigError, match=r"has 2 splits\. Name a file of one of them, such as "):
        load_labels(config_of(dataset))
    file = tmp_path / "toy_party3-0_corr_beta0.6_seed0_train.csv"
    check_columns(f"{VERTIBENCH}:{file}", rows_of(30)[0], rows_of(12, 1)[0])


def test_sequences_of_a_party_keep_their_shape(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for party, width in enumerate(WIDTHS):
        x = generator.normal(size=(30, 5, width)).astype(np.float32)
        np.savez(tmp_path / f"mosi_party3-{party}_train.npz", X=x, y=np.arange(30) % 2)
    config = config_of(f"{VERTIBENCH}:{tmp_path}", **{"bottom-model": "lstm"})
    assert [load_features(config, party, 3).train.shape[1:] for party in range(3)] == [
        (5, width) for width in WIDTHS
    ]


def test_files_that_change_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "toy_party3-0_imp_weight0.1_seed0_train.csv"
    vertibench(tmp_path)
    before = load_features(config_of(f"{VERTIBENCH}:{file}"), 1, 3).train
    xs, y = rows_of(30, 5)
    for party, x in enumerate(xs):
        write_csv(tmp_path / file.name.replace("3-0", f"3-{party}"), x, y, "fedtree")
    assert (load_features(config_of(f"{VERTIBENCH}:{file}"), 1, 3).train != before).any()


class Bad:
    """An object whose unpickling would run code."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("unpickled"),))


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "toy_party2-0_train.pkl"
    file.write_bytes(pickle.dumps(Bad()))
    for place in (tmp_path, file):
        with pytest.raises(ConfigError, match=r"pickled files.*save its X and y by numpy\.savez"):
            load_labels(config_of(f"{VERTIBENCH}:{place}"))
    file.unlink()
    for party in range(2):
        np.savez(tmp_path / f"toy_party2-{party}_train.npz", X=np.array([[Bad()]]), y=[1])
    with pytest.raises(ConfigError, match=r"toy_party2-0_train.npz of .* cannot be read"):
        load_features(config_of(f"{VERTIBENCH}:{tmp_path}"), 0, 2)
    assert not (tmp_path / "unpickled").exists()


ONE = "toy_party3-1_imp_weight0.1_seed0_train.csv"
Edit = Callable[[list[str]], list[str]] | None
BROKEN: dict[str, tuple[str, Edit, str]] = {  # files, how their lines change, and the sentence
    "missing": (ONE, None, rf"lacks the file {ONE}\. Add it\."),
    "fewer rows": (
        *(ONE, lambda lines: lines[:-2]),
        r"Party 1 of .* has 28 train rows, and there are 30 labels\. Give all",
    ),
    "other order": (
        *(ONE, lambda lines: [lines[0], *reversed(lines[1:])]),
        r"Party 1 of .* has train rows in another order than .* Sort all files",
    ),
    "text": (ONE, lambda lines: [*lines[:-1], "29,2,a lot\n"], f"{ONE} of .* cannot be read"),
    "other columns": (
        *(ONE, lambda lines: [line.strip() + ",1\n" for line in lines]),
        r"Party 1 of .* has other columns in its test part",
    ),
    "no labels": (
        *("*.csv", lambda lines: [line.replace("id,y,", "id,z,") for line in lines]),
        r"has no labels\. Add a column y",
    ),
    "empty": ("*.csv", None, r"has no party files\. Name them NAME_partyN-K_train\.csv"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_folder_that_cannot_be_used_is_refused_in_one_sentence(tmp_path: Path, how: str) -> None:
    config = config_of(vertibench(tmp_path))
    files, edit, said = BROKEN[how]
    for file in tmp_path.glob(files):
        if edit:
            file.write_text("".join(edit(file.read_text().splitlines(keepends=True))))
        else:
            file.unlink()
    with pytest.raises(ConfigError, match=said) as refused:
        load_features(config, 1, 3)
    assert "a lot" not in str(refused.value)


def test_the_number_of_parties_is_the_folders(tmp_path: Path) -> None:
    dataset = vertibench(tmp_path)
    with pytest.raises(ConfigError, match=r"divided among 3 parties, and the run has 2\. Use 3"):
        load_features(config_of(dataset), 0, 2)
    for kind in (VERTIBENCH, MARS_VFL):
        with pytest.raises(ConfigError, match=r"there is no such folder\. Correct its path\."):
            load_labels(config_of(f"{kind}:{tmp_path / 'elsewhere'}"))


def uci_har(folder: Path) -> tuple[list[Array], list[Array]]:
    """Write a small UCI HAR, and return both parties' training and test rows."""
    names = ["tBodyAcc-X", "tBodyGyro-X", "fBodyBodyGyroMag-Y", "angle(X)", "angle(tBodyGyroMean)"]
    gyroscope = [1, 2, 4]
    (folder / "features.txt").write_text("".join(f"{i} {n}\n" for i, n in enumerate(names, 1)))
    found = []
    for part, count, seed in (("train", 20, 0), ("test", 8, 1)):
        (folder / part).mkdir()
        x = np.random.default_rng(seed).normal(size=(count, len(names)))
        np.savetxt(folder / part / f"X_{part}.txt", x, fmt="%16.7e")
        np.savetxt(folder / part / f"y_{part}.txt", 1 + np.arange(count) % 2, fmt="%d")
        found.append([np.delete(x, gyroscope, 1), x[:, gyroscope]])
    return found[0], found[1]


@pytest.mark.parametrize("inside", ["", "UCI HAR Dataset"])
def test_uci_har_is_divided_by_sensor(tmp_path: Path, inside: str) -> None:
    folder = tmp_path / inside
    folder.mkdir(exist_ok=True)
    parts = uci_har(folder)
    check_columns(f"{MARS_VFL}:{tmp_path}", *parts)
    labels = load_labels(config_of(f"{MARS_VFL}:{tmp_path}"))
    assert labels.classes == (1, 2) and labels.test.tolist() == [0, 1] * 4
    with pytest.raises(ConfigError, match=r"divided among 2 parties"):
        load_features(config_of(f"{MARS_VFL}:{tmp_path}"), 0, 4)


def test_ku_har_is_divided_by_sensor_and_split_at_random(tmp_path: Path) -> None:
    signals = np.arange(20 * 1800).reshape(20, 1800) % 997
    rest = np.column_stack([np.arange(20) % 4, np.full(20, 300), np.arange(20)])
    file = tmp_path / "KU-HAR_20750x300.csv"
    np.savetxt(file, np.hstack([signals, rest]), delimiter=",", fmt="%g")
    config = config_of(f"{MARS_VFL}:{tmp_path}")
    labels = load_labels(config)
    assert labels.classes == (0, 1, 2, 3) and labels.places is not None
    for party in range(2):
        known = signals[:, 900 * party : 900 * (party + 1)][labels.places]
        block = load_features(config, party, 2)
        assert block.train.shape == (16, 900)
        np.testing.assert_allclose(
            block.train, (known - known.mean(0)) / known.std(0).clip(1e-9), atol=1e-3
        )


def nus_wide(folder: Path) -> tuple[list[Array], list[Array]]:
    """Write a small NUS-WIDE; return both parties' rows with a single topic, in their order."""
    topics = ("buildings", "grass", "animal", "water", "person")
    for each in ("Groundtruth/TrainTestLabels", "Low_Level_Features", "NUS_WID_Tags"):
        (folder / each).mkdir(parents=True)
    found = []
    for part, seed in (("Train", 0), ("Test", 1)):
        generator = np.random.default_rng(seed)
        colours, edges, tags = (generator.random((12, width)).round(4) for width in (3, 2, 4))
        for name, x in (("CH", colours), ("EDH", edges)):
            lines = [" ".join(f"{v:g}" for v in row) + " \n" for row in x]  # a space at the end
            (folder / "Low_Level_Features" / f"{part}_Normalized_{name}.dat").write_text(
                "".join(lines)
            )
        np.savetxt(folder / "NUS_WID_Tags" / f"{part}_Tags1k.dat", tags, "%g", delimiter="\t")
        labels = np.eye(5, dtype=int)[np.arange(12) % 5]
        labels[3] = 0
        labels[4, 0] = 1  # has two topics
        for topic, column in zip(topics, labels.T, strict=True):
            path = folder / "Groundtruth" / "TrainTestLabels" / f"Labels_{topic}_{part}.txt"
            np.savetxt(path, column, fmt="%d")
        kept = np.delete(np.arange(12), [3, 4])
        found.append([np.hstack([colours, edges])[kept], tags[kept]])
    return found[0], found[1]


def test_nus_wide_is_divided_into_images_and_tags_of_rows_with_one_topic(tmp_path: Path) -> None:
    check_columns(f"{MARS_VFL}:{tmp_path}", *nus_wide(tmp_path))
    labels = load_labels(config_of(f"{MARS_VFL}:{tmp_path}"))
    assert labels.classes == ("animal", "buildings", "grass", "person", "water")
    assert [labels.classes[each] for each in labels.train[:4]] == [
        *("buildings", "grass", "animal", "buildings")
    ]


def test_a_mars_vfl_folder_that_cannot_be_used_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "mosi_raw.pkl").write_bytes(b"not read")
    config = config_of(f"{MARS_VFL}:{tmp_path}")
    with pytest.raises(ConfigError, match=r"Save MARS-VFL's pickled and HDF5 data as .*npz"):
        load_labels(config)
    uci_har(tmp_path)
    y = tmp_path / "train" / "y_train.txt"
    y.write_text(y.read_text() + "1\n")
    with pytest.raises(ConfigError, match=r"has 20 train rows, and there are 21 labels"):
        load_features(config, 0, 2)
    (tmp_path / "test" / "X_test.txt").unlink()
    y.write_text(y.read_text()[:-2])
    with pytest.raises(ConfigError, match=r"lacks the file X_test\.txt\. Add it\."):
        load_features(config, 0, 2)
    (tmp_path / "features.txt").write_text("1 tBodyAcc-X\n")
    with pytest.raises(ConfigError, match=r"X_train\.txt of .* cannot be read"):
        load_features(config, 0, 2)
