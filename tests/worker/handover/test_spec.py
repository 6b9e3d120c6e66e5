from __future__ import annotations

from pathlib import Path

import pytest

from psrpc.core.errors import InvalidJob
from worker.handover.spec import SPEC, FitSpec, read_spec, write_spec


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    spec = FitSpec(
        train={"x": "x.npy"},
        batch_size=4,
        epochs=3,
        seed=1 << 60,
        class_weight={0: 1.0, 7: 0.25},
        fields={"intra_op_threads": 1},
    )
    write_spec(tmp_path, spec)
    assert read_spec(tmp_path) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, r"spec.json' is not the settings of a fit .*No such file.*pserver.Cluster"),
        ("[]", "is not the settings of a fit"),
        ("{}", r"is not the settings of a fit \('format'\)"),
        ('{"format": 9}', "has format 9; this version reads 1"),
    ],
)
def test_another_file_is_refused(text: str | None, says: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / SPEC).write_text(text)
    with pytest.raises(InvalidJob, match=says):
        read_spec(tmp_path)
