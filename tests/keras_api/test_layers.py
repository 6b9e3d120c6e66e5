"""Every class of ``keras.layers`` trains as in plain Keras, or is refused and told why."""

from __future__ import annotations

from importlib.util import find_spec

import keras
import numpy as np
import pytest

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidJob
from tests.keras_api.recipes import RECIPES, RECORDS, VARIANTS, Recipe, model_of, public_layers
from tests.keras_api.report import LAYERS, Outcome
from tests.keras_api.spectral import SpectralDense
from tests.worker.described_jobs import loaded
from tests.worker.flat_jobs import make_job
from tests.worker.keras_jobs import RATE, train, train_with_keras
from worker import Arrays, Job
from worker.describe.describe import describe

pytestmark = [
    pytest.mark.slow,
    # Keras has none for quantized kernels and in a SavedModel, and says so.
    pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning"),
    # Keras reads its own variables by an interface that numpy 2 wants changed.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

REFUSED = {
    "SpectralNormalization": "assigns the trainable variable",
    "TFSMLayer, trainable": "is a SavedModel, whose variables workers do not train",
}
"""What workers refuse, and why."""

ABSENT = {
    "FlaxLayer": "flax",
    "JaxLayer": "jax",
    "STFTSpectrogram": "scipy",
    "TorchModuleWrapper": "torch",
}
"""What needs a package that is none of ours. Where it is there, it may train; torch's modules do
not on TensorFlow, whose variables Keras cannot make of theirs."""

TRACED = {"MelSpectrogram"}
"""Layers whose values span so many powers of ten that only a trace rounds as a worker's does."""

NAMES = public_layers()
BATCHES = [BatchId(0, 0, 8), BatchId(0, 8, 8)]
"""The second sees all that the first has changed."""


def test_every_layer_has_a_recipe() -> None:
    assert RECIPES.keys() == NAMES.keys()


def job_of(recipe: Recipe) -> Job:
    y = np.random.default_rng(1).normal(size=(RECORDS, 2)).astype(np.float32)
    sgd = keras.optimizers.SGD(RATE)
    data = Arrays(recipe.data, y)
    return make_job(lambda: model_of(recipe), loss="mse", train=data, optimizer=sgd, engine="numpy")


def follows_keras(job: Job, traced: bool = False) -> tuple[str, ...]:
    """Trains ``job`` on shards and in plain Keras, and compares; returns its state variables."""
    described = describe(loaded(job))
    ours = train(job, [[batch] for batch in BATCHES], described=described)
    expected = train_with_keras(job, BATCHES, eagerly=not traced)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert np.isfinite(value).all(), name
        np.testing.assert_allclose(
            ours[name].astype(value.dtype), value, rtol=1e-3, atol=1e-5, err_msg=name
        )
    state = [v["name"] for v in described["variables"] if v["role"] == "state"]
    return tuple(name.rpartition("/")[2] for name in state)


@pytest.mark.parametrize("name", sorted([*NAMES, *VARIANTS]))
def test_a_layer_trains_as_in_keras_or_is_refused(name: str) -> None:
    if name == "TorchModuleWrapper" and find_spec("torch"):
        pytest.skip("Keras cannot make TensorFlow's variables of torch's parameters")
    aliases = tuple(NAMES.get(name, ()))
    job = job_of(RECIPES[name] if name in NAMES else VARIANTS[name])
    if name in REFUSED:
        with pytest.raises(InvalidJob, match=REFUSED[name]) as raised:
            follows_keras(job)
        assert raised.value.code == "PS108"
        LAYERS.append(Outcome(name, aliases, refused=str(raised.value)))
        return
    try:
        LAYERS.append(Outcome(name, aliases, follows_keras(job, name in TRACED)))
    except InvalidJob as error:
        if ABSENT.get(name, "no package") not in str(error):
            raise
        needs = f"needs {ABSENT[name]}, which is not among our requirements"
        LAYERS.append(Outcome(name, aliases, refused=needs))


def test_the_advised_replacement_of_spectral_normalization_trains() -> None:
    x = RECIPES["Dense"].data
    assert follows_keras(job_of(Recipe(x, lambda inputs: SpectralDense(4)(inputs)))) == ("u",)
