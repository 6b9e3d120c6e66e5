"""Criteo's format, and the generator of clicks whose probabilities are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.criteo.generate import main
from examples.criteo.records import CATEGORICAL, MISSING, NUMERIC, Records
from examples.criteo.truth import RANKS, Truth, auc
from examples.criteo.tsv import TsvFile, lines
from psrpc.core.errors import InvalidJob

GOLDEN = {
    "labels": [1, 1],
    "categorical": [3793791033, 2433363436, 1912513265, 1501169734],
    "probability": [0.3850697076, 0.5931588272],
}


def equal(one: Records, other: Records) -> bool:
    return all(
        np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )


def test_a_record_depends_on_the_seed_and_its_number_alone() -> None:
    whole, exact = Truth(1).records(0, 300)
    for start, stop in ((0, 1), (17, 120), (299, 300)):
        part, probability = Truth(1).records(start, stop)
        assert np.array_equal(probability, exact[start:stop])
        assert equal(part, Records(*(field[start:stop] for field in vars(whole).values())))
    assert not equal(whole, Truth(2).records(0, 300)[0])


def test_the_generator_stays_as_it_is() -> None:
    records, probability = Truth(1).records(5, 7)
    assert records.labels.tolist() == GOLDEN["labels"]
    assert records.categorical[0, :4].tolist() == GOLDEN["categorical"]
    assert probability == pytest.approx(GOLDEN["probability"], abs=1e-9)


def test_records_have_the_shape_of_criteos() -> None:
    records, probability = Truth(3).records(0, 20_000)
    assert records.numeric.shape == (20_000, NUMERIC)
    assert records.categorical.shape == (20_000, CATEGORICAL)
    assert 0.2 < records.labels.mean() < 0.4
    assert np.isnan(records.numeric).mean() == pytest.approx(0.1, abs=0.01)
    known = records.categorical[records.categorical != MISSING]
    assert known.size / records.categorical.size == pytest.approx(0.97, abs=0.01)
    assert known.min() >= 0
    assert known.max() < 1 << 32
    different = [len(np.unique(column)) for column in records.categorical.T]
    # One more for what is missing.
    assert different[:6] == (RANKS[:6] + 1).tolist()
    # Most of what a large field shows is new.
    assert min(different[-11:]) > 10_000
    assert (probability > 0).all()
    assert (probability < 1).all()


def test_labels_are_drawn_with_their_probability() -> None:
    records, probability = Truth(4).records(0, 50_000)
    order = np.argsort(probability)
    for tenth in np.split(order, 10):
        expected = probability[tenth].mean()
        # Five standard deviations of the mean of 5,000 draws.
        assert records.labels[tenth].mean() == pytest.approx(expected, abs=5 * 0.5 / 5000**0.5)


def test_nothing_is_better_than_the_true_probability() -> None:
    records, exact = Truth(5).records(0, 50_000)
    best = auc(exact, records.labels)
    # What is expected of the probabilities alone: each pair counts with the probability that the
    # first is a click and the second none.
    ascending = np.sort(exact)
    below = np.cumsum(1 - ascending) - (1 - ascending)
    expected = (ascending * below).sum() / ((ascending.sum()) * (1 - ascending).sum())
    assert best == pytest.approx(expected, abs=0.008)
    random = np.random.default_rng(0)
    noise = exact + random.normal(scale=0.1, size=len(exact))
    assert auc(noise, records.labels) < best - 0.005


def test_auc_counts_pairs() -> None:
    labels = np.array([0, 1, 0, 1], np.int8)
    assert auc(np.array([0.1, 0.4, 0.35, 0.8]), labels) == 1
    assert auc(np.array([0.8, 0.1, 0.4, 0.35]), labels) == 0
    assert auc(np.array([0.1, 0.3, 0.35, 0.8]), labels) == 0.75
    assert auc(np.full(4, 0.5), labels) == 0.5


def test_effects_are_of_the_category_alone() -> None:
    """Records of equal fields are equally likely, since a model sees nothing else."""
    _, exact = Truth(1).records(0, 200)
    ranks = np.tile(np.array([3] * CATEGORICAL), (2, 1))
    numeric = np.array([[np.nan] * NUMERIC, [0.0] * NUMERIC])
    logits = Truth(1)._logits(numeric, ranks)
    assert logits[0] == logits[1]
    assert len(np.unique(exact)) == len(exact)


@pytest.mark.parametrize("rows", [1, 1023, 1024, 1025, 2100])
def test_a_file_holds_what_was_generated(rows: int, tmp_path: Path) -> None:
    path = tmp_path / "clicks.tsv"
    records, _ = Truth(1).records(0, rows)
    path.write_text("".join(lines(records)))
    file = TsvFile(path)
    assert file.num_records == rows
    for start, stop in ((0, rows), (rows - 1, rows), (rows // 2, rows // 2 + 1)):
        expected, _ = Truth(1).records(start, stop)
        assert equal(file.records(start, stop), expected)


def test_lines_may_end_like_those_of_windows_and_the_last_one_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "clicks.tsv"
    records, _ = Truth(1).records(0, 3)
    path.write_bytes("".join(lines(records)).replace("\n", "\r\n").rstrip().encode())
    file = TsvFile(path)
    assert file.num_records == 3
    assert equal(file.records(0, 3), records)


def test_missing_fields_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "clicks.tsv"
    path.write_text("1" + "\t" * 39 + "\n" + "\t".join(["0", *["7"] * 13, *["fF"] * 26]) + "\n")
    records = TsvFile(path).records(0, 2)
    assert records.labels.tolist() == [1, 0]
    assert np.isnan(records.numeric[0]).all()
    assert (records.numeric[1] == 7).all()
    assert (records.categorical[0] == MISSING).all()
    assert (records.categorical[1] == 255).all()


GOOD = ["1", *["2"] * NUMERIC, *["0a"] * CATEGORICAL]


@pytest.mark.parametrize(
    ("column", "cell", "says"),
    [
        (0, "2", "line 3 has label '2'; expected 0 or 1"),
        (0, "", "line 3 has label ''; expected 0 or 1"),
        (4, "1.5", "line 3 has I4 '1.5'; expected a whole number or nothing"),
        (14, "xyz", "line 3 has C1 'xyz'; expected up to 8 hexadecimal digits or nothing"),
        (39, "123456789", "line 3 has C26 '123456789'; expected up to 8 hexadecimal digits"),
        (39, "-1", "line 3 has C26 '-1'"),
        (39, "1\t2", "line 3 has 41 columns; expected 40"),
    ],
)
def test_a_bad_line_is_named(column: int, cell: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "clicks.tsv"
    bad = [*GOOD[:column], cell, *GOOD[column + 1 :]]
    path.write_text("".join("\t".join(line) + "\n" for line in (GOOD, GOOD, bad, GOOD)))
    file = TsvFile(path)
    assert file.num_records == 4
    file.records(0, 2)
    file.records(3, 4)
    with pytest.raises(InvalidJob) as raised:
        file.records(1, 4)
    assert says in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match=r"there is no file '.*absent.tsv'"):
        TsvFile(tmp_path / "absent.tsv")


def test_another_file_has_another_fingerprint(tmp_path: Path) -> None:
    prints = set()
    for name, seed in (("a", 1), ("b", 2), ("c", 1)):
        path = tmp_path / name
        path.write_text("".join(lines(Truth(seed).records(0, 5)[0])))
        prints.add(TsvFile(path).fingerprint())
    assert len(prints) == 2


def test_ids_differ_where_fields_do() -> None:
    same = Records(
        np.array([1], np.int8),
        np.array([[np.nan, 0, -2, *[np.e - 1] * 10]], np.float32),
        np.array([[5] * 25 + [MISSING]]),
    )
    x, y = same.batch()
    assert y.tolist() == [[1.0]]
    assert y.dtype == x["numeric"].dtype == np.float32
    assert x["numeric"][0].tolist() == pytest.approx([0, 0, -np.log(3), *[1] * 10])
    assert len(np.unique(x["categorical"])) == CATEGORICAL
    everything = Truth(1).records(0, 1000)[0].batch()[0]
    assert all(array.flags.c_contiguous for array in everything.values())


def test_the_command_writes_a_file_and_the_best_auc(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "clicks.tsv"
    main(["--rows", "500", "--first", "100", "--seed", "7", "--to", str(path)])
    records, exact = Truth(7).records(100, 600)
    assert equal(TsvFile(path).records(0, 500), records)
    assert f"AUC of the true probabilities {auc(exact, records.labels):.4f}" in (
        capsys.readouterr().out
    )
