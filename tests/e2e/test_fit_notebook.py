"""The notebook of the examples runs; a kernel may be interrupted, and restarted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from tests.e2e.cluster import EXAMPLES, LIMIT_S, environment, processes_of, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fit,
    pytest.mark.filterwarnings("ignore:.*zmq.*:RuntimeWarning"),
]

NOTEBOOK = EXAMPLES / "fit_on_a_cluster.ipynb"

ENDLESS = """
import asyncio, keras, numpy as np, pserver

asyncio.get_running_loop()  # raises outside of one
x = np.random.default_rng(1).normal(size=(640, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("adam", "mse")
said = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("epoch", epoch))
with pserver.Cluster(workers=2) as cluster:
    try:
        model.fit(x, x[:, :1], epochs=100_000, verbose=0, callbacks=[said])
    except KeyboardInterrupt:
        print("interrupted after", int(model.optimizer.iterations))
    model.fit(x, x[:, :1], epochs=100_000, verbose=0, callbacks=[said])
"""


def form(notebook: Any) -> list[list[tuple[str, str]]]:
    """Returns what the outputs of each cell are, without numbers, and without what goes to standard
    error, where TensorFlow tells what the machine has."""
    return [
        [
            (output.output_type, re.sub(r"\d[\d.]*", "0", _shown(output)))
            for output in cell.outputs
            if output.get("name") != "stderr"
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def _shown(output: Any) -> str:
    if output.output_type == "stream":
        return re.sub(r"(?<=\d)[mu]?s/step", " s/step", output.text)
    # As a run begins it says how far its processes are.
    return re.sub(r"(?<=sync\)): .*(?=: <a)", "", str(output.data.get("text/html", "")))


def test_the_notebook_runs_and_its_kept_output_has_the_same_form(tmp_path: Path) -> None:
    kept = nbformat.read(NOTEBOOK, as_version=4)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    client = NotebookClient(
        notebook,
        timeout=LIMIT_S,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    # Raises where a cell fails.
    client.execute(env=environment())
    assert form(notebook) == form(kept)
    shown = [text for cell in form(kept) for _, text in cell]
    assert any('<a href="http://0:0/">dashboard</a>' in text for text in shown)
    for log in (tmp_path / "runs").glob("fit-*/up.log"):
        # A kernel has FORCE_COLOR: no terminal is drawn there all the same.
        assert re.search(r"(?m)^\[ *[\d.]+ s\] ", log.read_text())
    assert not processes_of(tmp_path / "runs")


def test_a_kernel_is_interrupted_and_restarted(tmp_path: Path) -> None:
    with kernel(tmp_path) as (manager, said):
        said(lambda text: text.startswith("epoch 2"))
        manager.interrupt_kernel()
        said(lambda text: text.startswith("interrupted after "))
        said(lambda text: text.startswith("epoch 2"))
        assert processes_of(tmp_path / "runs")
        manager.restart_kernel(now=True)
        until(lambda: not processes_of(tmp_path / "runs"), "the processes of the cluster to end")


@contextmanager
def kernel(folder: Path) -> Iterator[tuple[KernelManager, Callable[[Callable[[str], bool]], None]]]:
    """Starts a kernel that runs :data:`ENDLESS` in ``folder``. Yields it, and what waits for it to
    print something."""
    manager = KernelManager()
    manager.start_kernel(cwd=str(folder), env=environment())
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(LIMIT_S)
        client.execute(ENDLESS)

        def said(what: Callable[[str], bool]) -> None:
            while True:
                message = client.get_iopub_msg(timeout=LIMIT_S)
                assert message["msg_type"] != "error", message["content"]["traceback"]
                lines = message["content"].get("text", "").splitlines()
                if any(map(what, lines)):
                    return

        yield manager, said
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
