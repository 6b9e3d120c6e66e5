"""The keys of ``--set``: fields of a job, arguments of its optimizer, settings of the job file.

The commands that start a job cannot import ``Job``, so this module lists its fields; a test
compares them with ``Job``.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from psrpc.core.errors import InvalidJob, InvalidSetting
from psrpc.files.urls import similar_path


def read_job_file(path: Path) -> bytes:
    """Reads a job file, as a quick check before a process is started for it.

    Raises:
        InvalidJob: the file is missing or unreadable, or is a notebook or no text.
    """
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise InvalidJob(
            f"there is no job file {str(path)!r} (in {Path.cwd()}){similar_path(path)}",
            code="PS102",
        ) from None
    except OSError as error:
        raise InvalidJob(
            f"the job file {str(path)!r} cannot be read: {error.strerror}", code="PS102"
        ) from None
    if path.suffix == ".ipynb":
        raise InvalidJob(
            f"the job file {str(path)!r} is a notebook; expected a Python file: `jupyter nbconvert "
            f"--to script {shlex.quote(str(path))}` writes {str(path.with_suffix('.py'))!r}"
        )
    if b"\0" in source:
        raise InvalidJob(
            f"the job file {str(path)!r} is no Python file; name the one that makes the job"
        )
    return source


class UserCodeFailed(InvalidJob):
    """Code of the job file raised an error. The message is one line. ``user_traceback`` is the
    traceback from the user's first frame on, to be shown before the message."""

    code = "PS103"

    def __init__(self, message: str, user_traceback: str) -> None:
        super().__init__(message)
        self.user_traceback = user_traceback


_EVALUATION = "eval= takes the evaluation data, a data source: eval=Arrays(x, y)"
_RATE = (
    "it is an argument of the optimizer: optimizer=keras.optimizers.Adam(0.001), or "
    "--set optimizer.learning_rate=0.001"
)

_TRAINING = "train= takes the training data, a data source: train=Arrays(x, y)"
_WORKERS = "`coordinator up --workers N` says how many there are"
_GPUS = "workers take the GPUs that there are; `coordinator up --gpu` says which"
_RUN_DIR = "`coordinator up --run-dir RUN_DIR` says where the run is kept"
_READS_AHEAD = "a worker reads its next batches ahead by itself"
_ALL_OF_EVAL = "evaluations take all of eval, in batches of batch_size"


OPTIMIZER = "optimizer."
_FIELDS = """
    loss optimizer eval metrics batch_size epochs mode replicas aggregate speculate
    round_deadline_s balance staleness max_staleness staleness_lr delay_compensation dc_lambda
    dc_decay then then_after local_steps scale_lr warmup_epochs prefetch_rows seed init_from engine
    checkpoint_every full_checkpoint_every keep_checkpoints keep_best intra_op_threads devices
    sum_devices exact soft_placement dense slices wire_dtype
    compression topk stop_early reduce_lr evaluate_every_epoch
"""
FIELDS = tuple(_FIELDS.split())
"""Fields whose values can be written as text."""

WHOLE_NUMBERS = frozenset(
    {
        *("batch_size", "epochs", "full_checkpoint_every"),
        *("keep_checkpoints", "local_steps", "seed"),
    }
)
"""Fields that only a whole number fits."""

CODE = frozenset({"class_weight", "loss_weights", "model", "train"})
"""Fields that can only be set in code."""


def own_settings(path: Path) -> frozenset[str]:
    """Returns the names in calls of ``setting("name", ...)`` in the job file at ``path``, without
    running it; none if it is unreadable."""
    try:
        tree = ast.parse(read_job_file(path))
    except (InvalidJob, SyntaxError, ValueError):
        return frozenset()
    return frozenset(_literals(tree))


def literal_settings(tree: ast.Module) -> frozenset[str] | None:
    """Returns the names in calls of ``setting("name", ...)``; None if the file also uses
    ``setting`` in other ways."""
    found = list(_literals(tree))
    uses = sum(
        getattr(node, "id", getattr(node, "attr", getattr(node, "value", ""))) == "setting"
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute | ast.Constant)
    )
    renamed = any(
        isinstance(node, ast.alias) and node.name == "setting" and node.asname
        for node in ast.walk(tree)
    )
    return None if renamed or uses > len(found) else frozenset(found)


def _literals(tree: ast.Module) -> Iterator[str]:
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        first = getattr(call.args[0], "value", None)
        if name == "setting" and isinstance(call.args[0], ast.Constant) and isinstance(first, str):
            yield first


def setting_meant(words: Sequence[str], flag: str, *, exactly: bool) -> str:
    """Finds a setting of the job in ``words`` that was typed as an option: ``epochs=3`` for
    ``--epochs``; empty if there is none.

    Args:
        words: all words of the command line, including the job file.
        exactly: whether the names must be equal, not just similar.
    """
    name, equals, value = flag.partition("=")
    if not equals:
        after = words[words.index(flag) + 1 :][:1]
        value = next((word for word in after if not word.startswith("-")), "VALUE")
    files = [Path(word.rpartition("=")[2]) for word in words if word.endswith(".py")]
    own = [each for file in files for each in own_settings(file)]
    key = name.lstrip("-").replace("-", "_").removeprefix(OPTIMIZER)
    known = {each: each for each in (*FIELDS, *own)}
    known |= dict.fromkeys(("lr", "learning_rate"), OPTIMIZER + "learning_rate")
    cutoff = 1.0 if exactly else 0.8
    nearest = get_close_matches(key, sorted(known), n=1, cutoff=cutoff)
    return f"{known[nearest[0]]}={value}" if nearest else ""


def unknown_key(setting: str, key: str, known: Sequence[str]) -> InvalidSetting:
    """Returns the error for ``--set key=value`` with a key not in ``known``."""
    # Compares initials, too, since ``lr`` is not similar to ``learning_rate`` by letters.
    last = key.rpartition(".")[2]
    short = [name for name in known if last == _initials(name.rpartition(".")[2])]
    nearest = short or get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known keys: {', '.join(known)}"
    if key in INSTEAD and not short:
        # Inserts the user's value, so that the suggested line can be copied.
        hint = INSTEAD[key].replace("0.001", setting.partition("=")[2] or "0.001")
    return InvalidSetting(f"--set {setting}: there is no {key}; {hint}", code="PS104")


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


INSTEAD = {
    "callbacks": "stop_early and reduce_lr stand for EarlyStopping and ReduceLROnPlateau, keep_best"
    " and checkpoint_every for ModelCheckpoint; history.csv and TensorBoard's files are in the run "
    "directory; others are not run",
    "checkpoint_dir": _RUN_DIR,
    "data": _TRAINING,
    "dataset": _TRAINING,
    "gpu": _GPUS,
    "gpus": _GPUS,
    "initial_epoch": "`coordinator up --resume --run-dir RUN_DIR` goes on with a run; init_from "
    "starts from the values of another one",
    "initial_weights": "init_from= takes a Keras file, a checkpoint or a run directory",
    "learning_rate": _RATE,
    "lr": _RATE,
    "max_queue_size": _READS_AHEAD,
    "num_workers": _WORKERS,
    "output_dir": _RUN_DIR,
    "resume": "`coordinator up --resume --run-dir RUN_DIR` goes on with a run",
    "run_dir": _RUN_DIR,
    "run_eagerly": "workers compile the training step",
    "sample_weight": "weights are part of the data: train=Arrays(x, y, sample_weight)",
    "save_best_only": 'keep_best="min:loss" keeps the best checkpoint',
    "shards": "`coordinator up --shards K` says how many there are",
    "shuffle": "records are shuffled anew for each epoch, from seed",
    "steps_per_epoch": "an epoch is one pass over train; epochs says how many",
    "strategy": "the job's mode says how workers train together: async, sync or ssp",
    "train_data": _TRAINING,
    "use_multiprocessing": _READS_AHEAD,
    "validation_batch_size": _ALL_OF_EVAL,
    "validation_data": _EVALUATION,
    "validation_freq": "each epoch is evaluated; with evaluate_every_epoch=True none is left out",
    "validation_split": "eval= takes data of its own: train=Arrays(x[:900], y[:900]), "
    "eval=Arrays(x[900:], y[900:])",
    "validation_steps": _ALL_OF_EVAL,
    "verbose": "`coordinator up` shows the progress, `coordinator status` more",
    "weighted_metrics": "metrics weigh all records alike, the loss by their sample_weight",
    "weights": "init_from= takes a Keras file, a checkpoint or a run directory",
    "workers": _WORKERS,
    "x": _TRAINING,
    "y": _TRAINING,
}
"""Names that users try and that are not fields of a job -> the replacement."""
