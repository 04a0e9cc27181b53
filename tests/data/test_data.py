"""Data of parties and label holders: every source, the split, the scaling, the errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from sklearn.datasets import dump_svmlight_file

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import ArrayBlock, load_features, load_partition
from vfl_flower.data.partitioned import check_parties
from vfl_flower.protocol.systems import resolve

Array = NDArray[Any]
ROWS, COLUMNS = 40, 7


def config_of(dataset: str, **keys: Any) -> RunConfig:
    return resolve({"dataset": dataset, **{k.replace("_", "-"): v for k, v in keys.items()}})


def blocks(config: RunConfig, parties: int) -> list[ArrayBlock]:
    return [load_features(config, party, parties) for party in range(parties)]


def standardised(train: Array, rows: Array) -> Array:
    return (rows - train.mean(0)) / train.std(0)


def original_columns(block: Array, original: Array) -> list[int]:
    """Which columns of the original a block holds, found by correlation, scaled as it may be."""
    ours, all_of_them = (a.reshape(len(a), -1) for a in (block, original))
    ours, all_of_them = standardised(ours, ours), standardised(all_of_them, all_of_them)
    correlation = ours.T @ all_of_them / len(ours)
    assert (correlation.max(1) > 0.999).all()
    return correlation.argmax(1).tolist()


def table(rows: int = ROWS, seed: int = 0) -> pd.DataFrame:
    generator = np.random.default_rng(seed)
    frame = pd.DataFrame(
        generator.normal(3.0, 2.0, (rows, COLUMNS)), columns=[f"c{i}" for i in range(COLUMNS)]
    )
    frame.insert(3, "label", np.where(np.arange(rows) % 3 == 0, "yes", "no"))
    return frame


def save_npz(folder: Path, **arrays: Any) -> str:
    np.savez(folder / "data.npz", **arrays)
    return f"npz:{folder / 'data.npz'}"


def save_table(folder: Path, frame: pd.DataFrame, kind: str = "csv") -> str:
    path, x, y = folder / f"data.{kind}", frame.drop(columns="label").to_numpy(), frame["label"]
    if kind == "csv":
        frame.to_csv(path, index=False)
    elif kind == "npz":
        np.savez(path, X=x, y=y.to_numpy() if y.dtype.kind in "if" else y.to_numpy(str))
    elif kind == "svmlight":
        dump_svmlight_file(x, y, str(path))
    elif kind == "hf":
        import datasets

        datasets.Dataset.from_pandas(frame, preserve_index=False).save_to_disk(str(path))
    else:
        frame.to_parquet(path, index=False)
    return f"{kind}:{path}"


@pytest.fixture
def hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    return datasets


# --- sources ------------------------------------------------------------------------------------


def test_digits_are_images_of_ten_classes() -> None:
    config = config_of("digits", validation_fraction=0)
    labels = load_labels(config)
    assert labels.classes == tuple(range(10)) and labels.outputs == 10
    assert (len(labels.train), len(labels.test)) == (1437, 360)
    for block in blocks(config, 4):
        assert (block.train.shape, block.test.shape) == ((1437, 4, 4), (360, 4, 4))
        assert block.train.dtype == np.float32 and block.ids_digest == labels.ids_digest


def test_breast_cancer_is_a_table_of_two_classes_and_one_output() -> None:
    config = config_of("breast-cancer", test_fraction=0.25, validation_fraction=0)
    labels = load_labels(config)
    assert (labels.outputs, len(labels.train), len(labels.test)) == (1, 426, 143)
    assert sum(block.train.shape[1] for block in blocks(config, 4)) == 30


def test_npz_with_its_own_division_keeps_it(tmp_path: Path) -> None:
    X, y = np.random.default_rng(0).normal(size=(30, 4)), np.arange(30) % 3  # noqa: N806
    dataset = save_npz(tmp_path, X_train=X[:20], y_train=y[:20], X_test=X[20:], y_test=y[20:])
    config = config_of(dataset)
    labels, (block,) = load_labels(config), blocks(config, 1)
    assert labels.train.tolist() == y[:20].tolist()
    assert labels.test.tolist() == y[20:].tolist()
    np.testing.assert_allclose(block.train, standardised(X[:20], X[:20]), atol=1e-5)
    np.testing.assert_allclose(block.test, standardised(X[:20], X[20:]), atol=1e-5)


def test_without_a_test_fraction_all_rows_are_training_rows_and_test_rows(tmp_path: Path) -> None:
    frame = table()
    config = config_of(save_table(tmp_path, frame), test_fraction=0)
    labels, both = load_labels(config), blocks(config, 2)
    order = np.random.default_rng(0).permutation(ROWS)
    features = frame.drop(columns="label").to_numpy()
    expected = standardised(features, features)[order]
    for name in ("train", "test"):
        found = np.hstack([getattr(block, name) for block in both])
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert getattr(labels, name).tolist() == (order % 3 == 0).astype(int).tolist()
    assert labels.ids_digest == both[0].ids_digest


@pytest.mark.parametrize("saved", [True, False], ids=["save_to_disk", "csv-folder"])
@pytest.mark.parametrize("divided", [True, False], ids=["train-and-test", "train-only"])
def test_hugging_face_folder(tmp_path: Path, hugging_face: Any, saved: bool, divided: bool) -> None:
    folder = tmp_path / "data"
    frames = {"train": table(30), "test": table(12, seed=1)} if divided else {"train": table(42)}
    if saved:
        parts = {
            name: hugging_face.Dataset.from_pandas(each, preserve_index=False)
            for name, each in frames.items()
        }
        (hugging_face.DatasetDict(parts) if divided else parts["train"]).save_to_disk(str(folder))
    else:
        folder.mkdir()
        for name, each in frames.items():
            each.to_csv(folder / f"{name}.csv", index=False)
    config = config_of(f"hf:{folder}", test_fraction=12 / 42)
    both, labels = blocks(config, 2), load_labels(config)
    assert [b.train.shape for b in both] == [(30, 3), (30, 4)]
    assert [b.test.shape for b in both] == [(12, 3), (12, 4)]
    assert (len(labels.train), len(labels.test)) == (30, 12)
    assert labels.ids_digest == both[0].ids_digest
    if divided:
        features = frames["train"].drop(columns="label").to_numpy()
        expected = standardised(features, features)
        np.testing.assert_allclose(np.hstack([b.train for b in both]), expected, atol=1e-5)
        assert labels.train.tolist() == (frames["train"]["label"] == "yes").astype(int).tolist()


def test_hugging_face_images_are_divided_as_images(tmp_path: Path, hugging_face: Any) -> None:
    images = np.random.default_rng(0).normal(size=(20, 4, 6))
    data = hugging_face.Dataset.from_dict({"image": images.tolist(), "label": [0, 1] * 10})
    data.save_to_disk(str(tmp_path / "data"))
    config = config_of(f"hf:{tmp_path / 'data'}")
    assert [block.train.shape for block in blocks(config, 4)] == [(16, 2, 3)] * 4


def save_hugging_face(hugging_face: Any, path: Path, labels: list[Any], names: list[str]) -> str:
    classes = hugging_face.ClassLabel(names=names)
    features = hugging_face.Features({"x": hugging_face.Value("float64"), "label": classes})
    columns = {"x": [float(row) for row in range(len(labels))], "label": labels}
    hugging_face.Dataset.from_dict(columns, features=features).save_to_disk(str(path))
    return f"hf:{path}"


def test_hugging_face_parts_may_number_classes_otherwise(tmp_path: Path, hugging_face: Any) -> None:
    for part, names in (("train", ["no", "yes"]), ("test", ["yes", "no"])):
        save_hugging_face(hugging_face, tmp_path / "data" / part, [0, 0, 1, 1, 1], names)
    (tmp_path / "data" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    labels = load_labels(config_of(f"hf:{tmp_path / 'data'}"))
    assert labels.classes == ("no", "yes")
    assert labels.train.tolist() == [0, 0, 1, 1, 1]
    assert labels.test.tolist() == [1, 1, 0, 0, 0]


def test_hugging_face_classes_are_numbers_under_regression(
    tmp_path: Path, hugging_face: Any
) -> None:
    stars = [0, 1, 2, 3, 4] * 8
    names = [f"{star + 1} stars" for star in range(5)]
    dataset = save_hugging_face(hugging_face, tmp_path / "data", [*stars], names)
    labels = load_labels(config_of(dataset, target="regression"))
    order = np.random.default_rng(0).permutation(40)
    train = np.array(stars)[order[8:]]
    assert labels.classes == ()
    assert labels.mean == pytest.approx(train.mean())
    np.testing.assert_allclose(labels.train, standardised(train, train), atol=1e-5)


@pytest.mark.parametrize("absent", [-1, None])  # the library reads -1 as no label, too
def test_a_row_of_no_class_of_hugging_face_is_a_missing_label(
    tmp_path: Path, hugging_face: Any, absent: int | None
) -> None:
    given = [*([0, 1] * 10), absent]
    dataset = save_hugging_face(hugging_face, tmp_path / "data", given, ["no", "yes"])
    with pytest.raises(ConfigError, match="missing"):
        load_labels(config_of(dataset))


# --- files that change --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["npz", "csv", "parquet", "hf"])
def test_a_rewritten_data_set_is_read_anew(tmp_path: Path, hugging_face: Any, kind: str) -> None:
    def check(config: RunConfig, frame: pd.DataFrame) -> None:
        order = np.random.default_rng(0).permutation(ROWS)
        features, named = frame.drop(columns="label").to_numpy(), frame["label"].to_numpy()
        labels = load_labels(config)
        for part, rows in (("train", order[8:]), ("test", order[:8])):
            expected = standardised(features[order[8:]], features[rows])
            found = np.hstack([getattr(block, part) for block in blocks(config, 2)])
            np.testing.assert_allclose(found, expected, 1e-4)
            of_rows = np.array(labels.classes)[getattr(labels, part)]
            assert of_rows.tolist() == named[rows].tolist()

    first, second = table(), table(seed=1)
    second["label"] = first["label"].to_numpy()[::-1]
    config = config_of(save_table(tmp_path, first, kind))
    check(config, first)
    check(config, first)
    assert config_of(save_table(tmp_path, second, kind)) == config
    check(config, second)


def test_a_data_set_that_is_as_it_was_is_read_once(tmp_path: Path) -> None:
    config = config_of(save_table(tmp_path, table()))
    assert load_features(config, 1, 2) is load_features(config, 1, 2)


# --- which columns are whose --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "parties", "keys"),
    [
        ((10,), 3, {}),
        ((6, 6), 4, {}),
        ((7, 5), 6, {}),
        ((4, 4, 3), 4, {}),
        ((5, 9), 2, {}),
        ((7, 5), 3, {"image_split": "rows"}),
        ((6, 3, 2), 6, {"image_split": "rows"}),
        ((7, 5), 6, {"image_split": "flat"}),
        ((4, 4, 3), 5, {"image_split": "flat"}),
        ((5, 8), 3, {"bottom_model": "lstm"}),
    ],
    ids=str,
)
def test_blocks_side_by_side_hold_every_column_once(
    tmp_path: Path, shape: tuple[int, ...], parties: int, keys: dict[str, str]
) -> None:
    train = np.random.default_rng(0).normal(size=(64, *shape))
    labels = np.arange(64) % 2
    dataset = save_npz(tmp_path, X_train=train, y_train=labels, X_test=train, y_test=labels)
    held = [original_columns(b.train, train) for b in blocks(config_of(dataset, **keys), parties)]
    assert sorted(column for each in held for column in each) == list(range(np.prod(shape)))


def test_quadrants_rows_and_sequences_are_contiguous(tmp_path: Path) -> None:
    train = np.random.default_rng(0).normal(size=(64, 4, 6))
    labels = np.arange(64) % 2
    dataset = save_npz(tmp_path, X_train=train, y_train=labels, X_test=train, y_test=labels)
    columns = np.arange(24).reshape(4, 6)
    for keys, last in (
        ({}, columns[2:, 3:]),
        ({"image_split": "rows"}, columns[3:]),
        ({"image_split": "flat"}, columns.reshape(24, 1)[18:]),
        ({"bottom_model": "lstm"}, columns[:, 4:]),
    ):
        block = load_features(config_of(dataset, **keys), 3, 4)
        assert block.train.shape[1:] == last.shape
        assert original_columns(block.train, train) == last.ravel().tolist()


def save_svmlight(folder: Path, *parts: Array) -> str:
    for rows, path in zip(parts, (folder / "a", folder / "a.t"), strict=False):
        dump_svmlight_file(rows, np.where(np.arange(len(rows)) % 2, 1, -1), str(path))
    return f"svmlight:{folder / 'a'}"


def test_a_sparse_file_is_divided_as_it_stands_with_its_test_part(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    train, test = (generator.integers(-2, 3, (rows, COLUMNS)) * 0.5 for rows in (30, 10))
    config = config_of(save_svmlight(tmp_path, train, test))
    found, labels = blocks(config, 3), load_labels(config)
    assert (np.hstack([block.train for block in found]) == train).all()
    assert (np.hstack([block.test for block in found]) == test).all()
    assert labels.classes == (-1, 1) and labels.train.tolist() == [0, 1] * 15
    (tmp_path / "a.t").unlink()
    assert len(load_labels(config).test) == 6  # a fifth of the rows now


def test_a_sparse_file_is_never_dense_as_a_whole(tmp_path: Path) -> None:
    rows, columns = 4000, 2**20  # 17 GB
    place = tmp_path / "a"
    place.write_text("".join(f"{row % 2} {1 + row % 7}:1 {columns}:2\n" for row in range(rows)))
    block = load_partition(config_of(f"svmlight:{place}"), 1, 2)
    assert np.asarray(block.train[:2]).shape == (2, columns // 2)
    assert (np.asarray(block.train[np.array([5, 9])])[:, -1] == 2).all()


@pytest.mark.parametrize("line", ["1 2:x", "one 1:2", "1 5:1 3:1", "1 1:inf"])
def test_a_sparse_file_that_cannot_be_used_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "a").write_text(f"0 1:1\n{line}\n")
    with pytest.raises(ConfigError, match=r"(cannot be read|infinite values)") as refused:
        load_partition(config_of(f"svmlight:{tmp_path / 'a'}"), 0, 1)
    assert line not in str(refused.value)


def test_a_label_column_of_another_name_is_no_feature(tmp_path: Path) -> None:
    frame = table().rename(columns={"label": "c7"}).rename(columns={"c0": "label"})
    config = config_of(save_table(tmp_path, frame), label="c7")
    assert sum(block.train.shape[1] for block in blocks(config, 3)) == COLUMNS
    assert load_labels(config).classes == ("no", "yes")


# --- scaling ------------------------------------------------------------------------------------


def test_images_are_scaled_by_all_pixels_at_once(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (50, 4, 4)).astype(np.uint8)
    images[:, 0] = 0
    dataset = save_npz(tmp_path, X=images, y=np.arange(50) % 2)
    found = load_features(config_of(dataset), 0, 1).train
    assert found.mean() == pytest.approx(0, abs=1e-5) and found.std() == pytest.approx(1, rel=1e-5)
    assert np.unique(found[:, 0]).size == 1 and found[0, 0, 0] < -1


def test_a_constant_column_becomes_zero_and_other_test_values_stay_small(tmp_path: Path) -> None:
    rows = np.full((1437, 1), 0.1)  # so many 0.1 have a mean that is not quite 0.1
    labels = {"y_train": np.arange(1437) % 2, "y_test": np.arange(2)}
    dataset = save_npz(tmp_path, X_train=rows, X_test=np.array([[0.1], [0.2]]), **labels)
    block = load_features(config_of(dataset, validation_fraction=0), 0, 1)
    assert not block.train.any() and block.test[0] == 0 and abs(block.test[1]) < 10


def test_column_far_from_zero_is_scaled_before_it_is_rounded(tmp_path: Path) -> None:
    times = 1.7e9 + np.random.default_rng(0).uniform(0, 100, 200)  # seconds since 1970
    frame = pd.DataFrame({"time": times, "label": np.arange(200) % 2})
    train = load_features(config_of(save_table(tmp_path, frame)), 0, 1).train
    assert train.mean() == pytest.approx(0, abs=1e-3)
    assert train.std() == pytest.approx(1, rel=1e-3)


# --- nothing is unpickled -----------------------------------------------------------------------


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_object_arrays_are_never_unpickled(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    trap = np.array([Trap(sprung)] * 10, dtype=object)
    config = config_of(save_npz(tmp_path, X=trap[:, None], y=trap))
    with pytest.raises(ConfigError, match="numeric arrays"):
        load_features(config, 0, 1)
    with pytest.raises(ConfigError, match="numeric arrays"):
        load_labels(config)
    assert not sprung.exists()


# --- the sentences ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "keys", "sentence"),
    [
        ("breast-cancer", {}, "breast-cancer has 30 columns, too few to divide among 31"),
        ("digits", {"image_split": "rows"}, "digits has 8 rows of pixels, too few .* among 31"),
        ("digits", {}, "digits has 8 x 8 pixels, .* as a grid of 1 x 31. Use 30, the la"),
        ("digits", {"bottom_model": "lstm"}, "digits has 8 columns, too few .* among 31"),
    ],
)
def test_more_parties_than_columns(dataset: str, keys: dict[str, Any], sentence: str) -> None:
    config = config_of(dataset, **keys)
    with pytest.raises(ConfigError, match=sentence):
        load_features(config, 0, 31)
    with pytest.raises(ConfigError, match=sentence):
        check_parties(config.data, config.models.bottom == "lstm", 31)


@pytest.mark.parametrize(("parties", "works"), [(200, 64), (63, 56)])
def test_the_largest_number_of_parties_that_works_is_said(parties: int, works: int) -> None:
    data = config_of("digits").data
    with pytest.raises(ConfigError, match=f"among {parties} parties as .* Use {works}, the"):
        check_parties(data, False, parties)
    check_parties(data, False, works)


@pytest.mark.parametrize("kind", ["csv", "parquet", "npz", "svmlight"])
def test_too_many_parties_are_found_before_a_party_reads_columns(tmp_path: Path, kind: str) -> None:
    frame = pd.DataFrame(np.ones((4, 3)), columns=list("abc")).assign(label=[0, 1, 0, 1])
    data = config_of(save_table(tmp_path, frame, kind)).data
    check_parties(data, False, 3)
    with pytest.raises(ConfigError, match=r"3 columns, too few to divide among 4 parties\. Use 3"):
        check_parties(data, False, 4)


PARTS = {  # how a table is spoilt: so that its labels, or columns of party 1, cannot be used
    "no rows": (lambda f: f[:0], {}, "has no rows|cannot be loaded by the datasets library"),
    "no label column": (lambda f: f, {"label": "target"}, "no label column 'target'.* c0, c1, "),
    "a missing label": (lambda f: f.assign(label=f["label"].where(f.index != 4)), {}, "missing"),
    "a text": (lambda f: f.assign(c5="red"), {}, "^A column of .* is not numeric"),
    "a gap": (lambda f: f.assign(c6=f["c6"].where(f.index != 4)), {}, "party 1 .* missing or inf"),
}


@pytest.mark.parametrize("kind", ["csv", "parquet", "npz", "hf"])
@pytest.mark.parametrize("how", PARTS)
def test_what_a_table_lacks(tmp_path: Path, hugging_face: Any, kind: str, how: str) -> None:
    if kind == "npz" and how in ("no label column", "a text"):  # which it cannot have
        return
    spoil, keys, sentence = PARTS[how]
    numbers = {"label": np.arange(ROWS) % 2} if kind == "npz" else {}
    empty = kind == "hf" and how == "no rows"  # which its library refuses by itself
    dataset = save_table(tmp_path, spoil(table().assign(**numbers)), "csv" if empty else kind)
    config = config_of(f"hf:{tmp_path}" if empty else dataset, **keys)
    if how in ("a text", "a gap"):
        load_features(config, 0, 2)  # the party without that column does not mind
    with pytest.raises(ConfigError, match=sentence) as raised:
        load_features(config, 1, 2) if how in ("a text", "a gap") else load_labels(config)
    assert how != "a text" or "c5" not in str(raised.value)  # which may leave the party


def labelled(y: Any, rows: int = 20) -> Callable[[Path], str]:
    return lambda folder: save_npz(folder, X=np.ones((rows, 2)), y=y)


NORMAL = labelled(np.random.default_rng(0).normal(size=20))
WRONG: list[tuple[Callable[[Path], str], dict[str, float], str]] = [
    (
        labelled(np.arange(2), 2),
        {"test_fraction": 0.9},
        "2 rows and test-fraction = 0.9 leav",
    ),
    (labelled(np.float64(1.0)), {}, r"have shape \(\)\. Give one"),
    (labelled(np.zeros((20, 2))), {}, r"have shape \(20, 2\)\. Give"),
    *(
        (NORMAL, {"test_fraction": n}, "take 20 values in 20 rows.* looks like ids")
        for n in (0.2, 0)
    ),
    *(
        (lambda folder, kind=kind: f"{kind}:{folder / 'none'}", {}, "there is no such file")
        for kind in ("npz", "csv", "parquet")
    ),
    *(
        (lambda _, name=name: name, {}, "is not known: use digits, breast-cancer, npz:PATH")
        for name in ("mnist", "csv", "csv:", "", "json:a.json")
    ),
    (lambda _: "hf:no-one/no-such-data", {}, "cannot be loaded by the datasets library"),
]


@pytest.mark.parametrize(("make", "keys", "sentence"), WRONG)
def test_what_is_no_data_set_is_refused(
    tmp_path: Path, hugging_face: Any, make: Any, keys: dict[str, float], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_labels(config_of(make(tmp_path), **keys))


@pytest.mark.parametrize("content", [b"PK\x03\x04 cut short", b"text", b"\x93NUMPY\x01\0", b""])
@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_file_that_is_not_what_it_claims(tmp_path: Path, kind: str, content: bytes) -> None:
    (tmp_path / "data").write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot be read|is empty"):
        load_labels(config_of(f"{kind}:{tmp_path / 'data'}"))


@pytest.mark.parametrize(
    "columns",
    [
        {"x": [[1.0, 2.0], [1.0]] * 10},  # sequences of different lengths
        {"x": [1.0] * 20, "image": [[1.0, 2.0]] * 20},  # numbers beside sequences
    ],
    ids=["ragged", "mixed"],
)
def test_hugging_face_columns_that_form_no_array(
    tmp_path: Path, hugging_face: Any, columns: dict[str, Any]
) -> None:
    data = hugging_face.Dataset.from_dict({**columns, "label": [0, 1] * 10})
    data.save_to_disk(str(tmp_path / "data"))
    with pytest.raises(ConfigError):
        load_features(config_of(f"hf:{tmp_path / 'data'}"), 0, 1)


def test_hugging_face_without_a_training_part(tmp_path: Path, hugging_face: Any) -> None:
    part = hugging_face.Dataset.from_pandas(table())
    hugging_face.DatasetDict({"validation": part}).save_to_disk(str(tmp_path / "data"))
    with pytest.raises(ConfigError, match="train"):
        load_labels(config_of(f"hf:{tmp_path / 'data'}"))


def test_few_rows_are_named_before_training(caplog: pytest.LogCaptureFixture) -> None:
    load_labels(config_of("digits", test_fraction=0.99)).warn_of_few()
    assert "There are 17 training rows and 1780 test rows." in caplog.text
    caplog.clear()
    load_labels(config_of("digits")).warn_of_few()
    assert not caplog.text
