"""What ``--set`` may name: fields of a job, arguments of its optimizer, settings of the job file.

The commands that start a job cannot import ``worker.Job``. A test compares this with its fields.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from psrpc.core.errors import InvalidJob, InvalidSetting
from psrpc.options.job_file import read_job_file
from psrpc.options.job_instead import INSTEAD

OPTIMIZER = "optimizer."

_FIELDS = """
    loss optimizer eval metrics batch_size epochs mode replicas aggregate speculate
    round_deadline_s balance staleness max_staleness staleness_lr delay_compensation dc_lambda
    dc_decay then then_after local_steps scale_lr warmup_epochs prefetch_rows seed init_from engine
    checkpoint_every full_checkpoint_every keep_checkpoints keep_best intra_op_threads wire_dtype
    compression topk stop_early reduce_lr evaluate_every_epoch
"""
FIELDS = tuple(_FIELDS.split())
"""Those that a text can express."""

CODE = frozenset({"class_weight", "loss_weights", "model", "train"})
"""The others."""


def own_settings(path: Path) -> frozenset[str]:
    """The names that the job file at ``path`` asks for with ``setting("name", ...)``, found without
    running it; none where it cannot be read."""
    try:
        tree = ast.parse(read_job_file(path))
    except (InvalidJob, SyntaxError, ValueError):
        return frozenset()
    return frozenset(_literals(tree))


def literal_settings(tree: ast.Module) -> frozenset[str] | None:
    """The names that a file asks for with ``setting("name", ...)``; None if it uses ``setting`` in
    another way, too."""
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
    """The setting that somebody has typed as an option: ``epochs=3`` for ``--epochs`` in ``words``;
    empty if a job has none of this name.

    Args:
        words: of the whole command line, the job file among them.
        exactly: it must have just this name, not one that is spelt much like it.
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
    """The error for ``--set key=value`` with a key that is none of those ``known``."""
    # ``lr`` is as far from ``learning_rate`` as from anything.
    last = key.rpartition(".")[2]
    short = [name for name in known if last == _initials(name.rpartition(".")[2])]
    nearest = short or get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known keys: {', '.join(known)}"
    if key in INSTEAD and not short:
        hint = INSTEAD[key]
    return InvalidSetting(f"--set {setting}: there is no {key}; {hint}", code="PS104")


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))
