from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.records.tensorboard import EventWriter

# The reader of the `tensorboard` command, in a process where TensorFlow cannot be imported. That
# also keeps the reader's deprecation warnings out of this process, where warnings are errors.
READ_BACK = """
import json, sys
sys.modules["tensorflow"] = None
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util import tensor_util
events = EventAccumulator(sys.argv[1])
events.Reload()
print(json.dumps({
    tag: [[e.step, e.wall_time, float(tensor_util.make_ndarray(e.tensor_proto))]
          for e in events.Tensors(tag)]
    for tag in events.Tags()["tensors"]
    if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"
}))
"""


def read_back(logdir: Path) -> dict[str, list[list[float]]]:
    """Tag → [step, wall time, value] of each point, as TensorBoard shows it."""
    run = subprocess.run(
        [sys.executable, "-c", READ_BACK, str(logdir)], capture_output=True, text=True, check=True
    )
    points: dict[str, list[list[float]]] = json.loads(run.stdout)
    return points


@pytest.mark.slow
def test_stock_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    logdir = tmp_path / "run" / "tensorboard"
    with EventWriter(logdir, wall_clock=lambda: 1234.5) as writer:
        writer.scalar("train/loss", 2.5, 1)
        writer.scalar("train/loss", 1.5, 2**40)
        writer.scalar("eval/accuracy", 0.75, 2)
        writer.scalar("train/loss", float("nan"), 2**40 + 1)
    points = read_back(logdir)
    assert points["eval/accuracy"] == [[2, 1234.5, 0.75]]
    assert points["train/loss"][:2] == [[1, 1234.5, 2.5], [2**40, 1234.5, 1.5]]
    assert math.isnan(points["train/loss"][2][2])


HPARAMS = """
import json, sys
sys.modules["tensorflow"] = None
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from google.protobuf.json_format import MessageToDict
events = EventAccumulator(sys.argv[1])
events.Reload()
content = events.PluginTagToContent("hparams")[metadata.SESSION_START_INFO_TAG]
print(json.dumps(MessageToDict(metadata.parse_session_start_info_plugin_data(content))["hparams"]))
"""


@pytest.mark.slow
def test_stock_tensorboard_reads_the_settings_of_a_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rate": 0.1, "width": 32.0, "kind": "relu", "on": True, "x": None}
    with EventWriter(tmp_path) as writer:
        writer.hparams(settings)
        writer.scalar("eval/accuracy", 0.75, 2)
    read = [sys.executable, "-c", HPARAMS, str(tmp_path)]
    found = subprocess.run(read, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == {**settings, "x": "none"}


@pytest.mark.slow
def test_a_second_writer_continues_the_same_run(tmp_path: Path) -> None:
    with EventWriter(tmp_path, wall_clock=lambda: 100.0) as writer:
        writer.scalar("loss", 4.0, 1)
    with EventWriter(tmp_path, wall_clock=lambda: 101.0) as writer:
        writer.scalar("loss", 3.0, 2)
    assert read_back(tmp_path)["loss"] == [[1, 100.0, 4.0], [2, 101.0, 3.0]]


@pytest.mark.slow
def test_flushed_points_are_there_while_the_file_is_open(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as writer:
        writer.scalar("loss", 4.0, 1)
        writer.flush()
        assert [point[::2] for point in read_back(tmp_path)["loss"]] == [[1, 4.0]]


@pytest.mark.slow
def test_writing_does_not_import_tensorflow() -> None:
    check = "import sys, coordinator.records.tensorboard; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


SHOW_ALL = """
import json, sys
sys.modules["tensorflow"] = None
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util import tensor_util
events = EventAccumulator(sys.argv[1])
events.Reload()
found = {}
for tag in events.Tags()["tensors"]:
    plugin = events.SummaryMetadata(tag).plugin_data.plugin_name
    arrays = [tensor_util.make_ndarray(e.tensor_proto) for e in events.Tensors(tag)]
    values = [[x.decode() for x in a.flat] if plugin == "text" else a.tolist() for a in arrays]
    found[tag] = [plugin, [e.step for e in events.Tensors(tag)], values]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_stock_tensorboard_reads_histograms_and_texts(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as writer:
        writer.histogram("staleness", [812, 0, 9, 0, 0], 7)
        writer.histogram("nothing", [0, 0], 7)
        writer.text("policy", "`sync replicas=3`", 9)
    run = subprocess.run(
        [sys.executable, "-c", SHOW_ALL, str(tmp_path)], capture_output=True, text=True, check=True
    )
    found = json.loads(run.stdout)
    assert found["policy"] == ["text", [9], [["`sync replicas=3`"]]]
    plugin, steps, [buckets] = found["staleness"]
    assert (plugin, steps) == ("histograms", [7])
    # Left edge, right edge, count of each bucket.
    assert buckets == [[0.0, 0.5, 812.0], [0.5, 1.5, 0.0], [1.5, 2.0, 9.0]]
    assert "nothing" not in found


def test_nothing_is_made_before_the_first_scalar(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "logs") as writer:
        writer.flush()
    assert list(tmp_path.iterdir()) == []


def test_a_closed_writer_opens_another_file(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, wall_clock=lambda: 100.0)
    writer.scalar("loss", 1.0, 1)
    writer.close()
    writer.close()
    writer.scalar("loss", 1.0, 2)
    writer.close()
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2
