"""Copies from and to S3: initial values, rows, exports."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load

from coordinator.cli.__main__ import main as coordinator
from pserver.engine.first_rows import FirstRows
from psrpc.checkpoint.initial_values import checkpoint_here, dense_files
from psrpc.core.errors import CheckpointError, InvalidArgument, InvalidData, InvalidJob
from psrpc.files import remote_copies
from psrpc.files.remote_copies import upload
from tests.psrpc.rows import TABLES, DictTable, plan_of
from tests.psrpc.rows import write_checkpoint as write_rows
from tests.stores.conftest import Bucket
from tests.worker.export.test_export import flat_values, write_checkpoint, write_job
from worker import Npz
from worker.describe.describe import describe
from worker.export.export import export
from worker.job.loader import load_job
from worker.step.initializer import first_rows, load_values
from worker.step.replica import Replica

pytestmark = [
    pytest.mark.slow,
    # Keras reads its own variables by an interface that numpy 2 wants changed.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_exports_and_initial_values(tmp_path: Path, temporary: Path, bucket: Bucket) -> None:
    path = write_job(tmp_path)
    replica = Replica(load_job(path).job)
    checkpoint = write_checkpoint(tmp_path, replica)
    expected = flat_values(replica, scale=1)
    for name in ("m.keras", "m.weights.h5", "deep/saved/"):
        export(str(path), checkpoint, bucket.url(name))
        with pytest.raises(InvalidArgument, match=f"--to s3://.*/{name}: there is something"):
            export(str(path), checkpoint, bucket.url(name))
    assert {"m.keras", "m.weights.h5", "deep/saved/saved_model.pb"} < set(bucket.objects())
    bucket.put_folder(checkpoint, "kept/step-00000007.g1")

    for name in ("m.keras", "m.weights.h5", "kept/step-00000007.g1", "kept/step-00000007.g1/"):
        fresh = Replica(load_job(path).job)
        load_values(fresh, bucket.url(name))
        for variable in fresh.model.variables:
            np.testing.assert_array_equal(variable.numpy(), expected[variable.path])
        described = describe(load_job(path, [f"init_from={bucket.url(name)}"]))
        assert described["variables"]
    with pytest.raises(InvalidJob, match=r"init_from is 's3://.*no.keras'; there is no such file"):
        describe(load_job(path, [f"init_from={bucket.url('no.keras')}"]))
    with pytest.raises(InvalidJob, match=r"init_from 's3://.*/kept': .*/kept has no manifest.json"):
        describe(load_job(path, [f"init_from={bucket.url('kept')}"]))
    left = [one.name for one in temporary.iterdir()]
    # Of TensorFlow's AutoGraph, with its bytecode.
    assert [n for n in left if not n.startswith(("__autograph", "__pycache__"))] == []


def test_a_saved_model_is_whole_or_not_there(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.export(str(tmp_path / "saved"), verbose=False)
    put, names = remote_copies._put, []

    def failing(filesystem: object, source: Path, path: str, url: str) -> None:
        names.append(source.name)
        if source.name == "saved_model.pb":
            raise InvalidData("no more")
        put(filesystem, source, path, url)

    monkeypatch.setattr(remote_copies, "_put", failing)
    with pytest.raises(InvalidData, match="no more"):
        upload(tmp_path / "saved", bucket.url("saved"))
    assert names[-1] == "saved_model.pb"
    assert len(names) > 2
    assert bucket.objects() == []
    monkeypatch.undo()
    upload(tmp_path / "saved", bucket.url("saved/"))
    for key in bucket.objects():
        target = tmp_path / "back" / key
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(bucket.get(key))
    x = np.ones((3, 2), np.float32)
    loaded = tf.saved_model.load(str(tmp_path / "back" / "saved"))
    np.testing.assert_array_equal(loaded.serve(x), model(x))


def test_where_things_are_not_replaced_a_file_gets_its_name_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").write_bytes(b"data")
    monkeypatch.setattr(remote_copies, "_OBJECT_STORES", set())
    # As HDFS: fsspec's own local files, which no URL of a user's leads to.
    upload(tmp_path / "source", f"local://{tmp_path}/new/folder/target")
    assert (tmp_path / "new" / "folder" / "target").read_bytes() == b"data"
    assert len(list((tmp_path / "new" / "folder").iterdir())) == 1


def test_rows_of_a_checkpoint(tmp_path: Path, temporary: Path, bucket: Bucket) -> None:
    held = [DictTable(spec, {}) for spec in TABLES]
    checkpoint = write_rows(tmp_path, plan_of(2), held, 10)
    url = bucket.put_folder(checkpoint, "kept")
    job = namedtuple("job", "init_from")(url)
    assert first_rows(job, plan_of(1)) == url  # type: ignore[arg-type]

    source = FirstRows(url, plan_of(1), 0)
    assert source.load(30) is not None
    assert not list(temporary.iterdir())


def test_errors_in_a_copy_name_the_url(tmp_path: Path, bucket: Bucket) -> None:
    with pytest.raises(CheckpointError, match=r"s3://.*/kept has no manifest.json: it is not a"):
        checkpoint_here(bucket.url("kept"), dense_files).__enter__()
    with pytest.raises(InvalidData, match="simplecache::s3://b/c: copies are made of what a URL"):
        checkpoint_here("simplecache::s3://b/c", dense_files).__enter__()
    checkpoint = write_rows(tmp_path, plan_of(2), [DictTable(spec, {}) for spec in TABLES], 10)
    url = bucket.put_folder(checkpoint, "kept")
    [name, *_] = [path.name for path in checkpoint.glob("shard-*")]
    bucket.client.delete_object(Bucket=bucket.name, Key=f"kept/{name}")
    with pytest.raises(CheckpointError, match=rf"{url} has no file {name}, which its manifest"):
        checkpoint_here(url, dense_files).__enter__()
    bucket.put("kept/manifest.json", b"{}")
    with pytest.raises(CheckpointError, match=rf"{url}/manifest.json is not a manifest"):
        checkpoint_here(url).__enter__()


def test_no_room_for_a_copy_is_an_error_before_it_is_made(
    bucket: Bucket, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = bucket.put("x.npz", b"12345")
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(4))
    with pytest.raises(InvalidData, match=rf"{url} has 5 bytes, and {temporary} has room for 4"):
        _ = Npz(url).num_records


def test_tables_and_variables(
    tmp_path: Path, bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    held = [DictTable(spec, {}) for spec in TABLES]
    checkpoint = write_rows(tmp_path, plan_of(2), held, 10)
    assert coordinator(["export", str(checkpoint), "--tables", bucket.url("tables/")]) == 0
    assert bucket.objects() == [f"tables/{n}.safetensors" for n in ("items%2Fnew", "model", "user")]
    assert load(bucket.get("tables/user.safetensors"))["rows"].shape == (0, 3)
    assert f"wrote {bucket.url('tables/user.safetensors')} from" in capsys.readouterr().err
    same = ["--tables", bucket.url("x"), "--evicted", bucket.url("x/")]
    assert coordinator(["export", str(checkpoint), *same]) == 2
    assert "--tables and --evicted are both s3://" in capsys.readouterr().err
