"""Job files: what is loaded, and whose error is shown."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path

import pytest

from psrpc.core.errors import InvalidJob
from psrpc.options.job_keys import UserCodeFailed
from worker.job.loader import load_job, user_code

JOB = """
import numpy as np
from worker import Arrays, Job

job = Job(
    model=lambda: None, loss="mse", optimizer="sgd", batch_size=2,
    train=Arrays(np.zeros((4, 1)), np.zeros(4)),
)
"""


def write(tmp_path: Path, text: str, name: str = "train.py") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_job_file_is_loaded_with_its_hash_and_settings(tmp_path: Path) -> None:
    path = write(tmp_path, JOB)
    loaded = load_job(path, ["epochs=3", "optimizer.momentum=0.5"])
    assert loaded.name == "train"
    assert loaded.path == path
    assert loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert loaded.job.epochs == 3
    assert loaded.optimizer_arguments == {"momentum": "0.5"}


def test_a_search_is_kept_as_text(tmp_path: Path) -> None:
    search = """
from pserver import space
search = {"optimizer.learning_rate": space.log(1e-4, 0.1), "width": [32, 64], "loss": "choice(a)"}
"""
    assert load_job(write(tmp_path, JOB + search)).search == {
        "optimizer.learning_rate": "log(0.0001, 0.1)",
        "width": "[32, 64]",
        "loss": "choice(a)",
    }
    other = JOB + "\ndef search(): ...\n"
    assert load_job(write(tmp_path, other)).search == {}


def test_the_bytes_that_are_hashed_are_run_never_a_cached_copy(tmp_path: Path) -> None:
    path = write(tmp_path, JOB)
    assert load_job(path).job.batch_size == 2
    path.write_text(JOB.replace("batch_size=2", "batch_size=3"))  # same length, same second
    assert load_job(path).job.batch_size == 3
    assert not (tmp_path / "__pycache__").exists()


def test_a_job_file_imports_its_siblings_and_knows_its_folder(tmp_path: Path) -> None:
    write(tmp_path, "SIZE = 4\n", "sibling_of_a_job.py")
    text = "from pathlib import Path\nfrom sibling_of_a_job import SIZE\n"
    text += JOB.replace("batch_size=2", "batch_size=SIZE, init_from=Path(__file__).parent")
    job = load_job(write(tmp_path, text)).job
    assert job.batch_size == 4
    assert job.init_from == tmp_path


def test_a_name_like_a_module_hides_no_module(tmp_path: Path) -> None:
    import json

    assert load_job(write(tmp_path, JOB, "json.py")).name == "json"
    import json as again

    assert again is json


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", "defines no job; add: job = Job(...)"),
        ("job = 3", "is a int; expected a worker.Job"),
        (JOB.replace("batch_size=2", "batch_size=0"), "batch_size is 0 (int)"),
    ],
)
def test_a_file_without_a_usable_job(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InvalidJob) as raised:
        load_job(path)
    assert says in str(raised.value)
    assert str(path) in str(raised.value)
    assert not isinstance(raised.value, UserCodeFailed)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match="there is no job file"):
        load_job(tmp_path / "absent.py")
    with pytest.raises(InvalidJob, match="cannot be read: Is a directory"):
        load_job(tmp_path)


def test_only_the_users_frames_are_shown(tmp_path: Path) -> None:
    path = write(tmp_path, "def deep():\n    raise KeyError('lost')\n\ndeep()\n")
    with pytest.raises(UserCodeFailed) as raised:
        load_job(path)
    assert str(raised.value) == f"job file {path} raised KeyError: 'lost'"
    text = raised.value.user_traceback
    assert f'File "{path}", line 4, in <module>' in text
    assert f'File "{path}", line 2, in deep' in text
    assert "loader.py" not in text
    assert "importlib" not in text


def test_a_syntax_error_is_shown_where_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, "x = (\n")
    with pytest.raises(UserCodeFailed) as raised:
        load_job(path)
    assert "SyntaxError" in str(raised.value)
    assert f'File "{path}", line 1' in raised.value.user_traceback
    assert "loader.py" not in raised.value.user_traceback


def test_no_frame_of_ours_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text("from pserver import space\nsearch = space.integers(3, 1)\n")
    with pytest.raises(UserCodeFailed, match="is reversed") as raised:
        load_job(path)
    assert raised.value.user_traceback.count("  File ") == 1


def test_a_file_that_exits_or_imports_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserCodeFailed, match="raised SystemExit: 3"):
        load_job(write(tmp_path, "import sys\nsys.exit(3)\n"))
    with pytest.raises(UserCodeFailed, match="No module named 'no_such_thing'"):
        load_job(write(tmp_path, "import no_such_thing\n"))


def test_an_interrupt_is_not_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        load_job(write(tmp_path, "raise KeyboardInterrupt\n"))


def test_wrappings_of_messages_are_taken_off() -> None:
    wrapped = "Exception encountered when calling Dense.call().\n\n\x1b[1mbad shape\x1b[0m\n"
    with pytest.raises(UserCodeFailed) as raised, user_code("the model"):
        raise ValueError(wrapped)
    assert str(raised.value) == (
        "the model raised ValueError: Exception encountered when calling Dense.call(). bad shape"
    )


def test_frames_that_tensorflow_puts_into_messages() -> None:
    import worker.job.loader

    traced = f"""in user code:

    File "{worker.job.loader.__file__}", line 3, in trace  *
        ours()
    File "/home/me/train.py", line 12, in loss  *
        return tf.reshape(x, [7])

    ValueError: Cannot reshape 6 elements
"""
    with pytest.raises(UserCodeFailed) as raised, user_code("the training step"):
        raise ValueError(traced)
    assert str(raised.value) == ("the training step raised ValueError: Cannot reshape 6 elements")
    assert "train.py" in raised.value.user_traceback
    assert "return tf.reshape" in raised.value.user_traceback
    assert "ours()" not in raised.value.user_traceback


NO_VALUE = (
    ": it is compiled (tf.function) before tensors have values, so .numpy(), float(), bool() and "
    "NumPy's functions cannot be used there; use keras.ops or tf"
)


def test_a_tensor_without_a_value_is_said_to_be_compiled() -> None:
    """Keras has the cause a line further down, TensorFlow all of it in the message."""
    traced = """in user code:

    File "/home/me/train.py", line 12, in call  *
        print(x.numpy().mean())

    AttributeError: Exception encountered when calling M.call().
    
    \x1b[1m'SymbolicTensor' object has no attribute 'numpy'\x1b[0m
    
    Arguments received by M.call():
"""  # noqa: W293
    with pytest.raises(UserCodeFailed) as raised, user_code("the training step"):
        raise AttributeError(traced)
    assert str(raised.value) == (
        "the training step raised AttributeError: Exception encountered when calling M.call(). "
        f"'SymbolicTensor' object has no attribute 'numpy' in train.py, line 12{NO_VALUE}"
    )


def test_the_cause_is_after_what_keras_could_not_infer() -> None:
    inferring = (
        "Exception encountered when calling L.call().\n\n\x1b[1mCould not automatically infer the "
        "output shape of 'l'. Error encountered:\n\n'SymbolicTensor' object has no attribute "
        "'numpy'\x1b[0m\n\nArguments received by L.call():\n"
    )
    with pytest.raises(UserCodeFailed) as raised, user_code("model()"):
        raise AttributeError(inferring)
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    assert str(raised.value) == (
        "model() raised AttributeError: Exception encountered when calling L.call(). Could not "
        "automatically infer the output shape of 'l'. Error encountered: 'SymbolicTensor' object "
        f"has no attribute 'numpy' in test_loader.py, line {line}{NO_VALUE}"
    )


def test_our_own_errors_come_through_a_traced_function_as_one_line() -> None:
    traced = 'in user code:\n\n    File "/x.py", line 3, in f  *\n        g()\n\n'
    with pytest.raises(InvalidJob) as raised, user_code("the training step"):
        raise InvalidJob(traced + "    InvalidJob: the loss is bad\n")
    assert str(raised.value) == "the training step: the loss is bad"
