"""Keys of losses, weights, metrics, labels and inputs, and shapes, that a model does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from psrpc.core.errors import InvalidJob
from psrpc.options.job_keys import UserCodeFailed
from tests.worker.described_jobs import described, make_job
from worker import Arrays
from worker.data.ragged import as_tensor
from worker.data.source import map_arrays
from worker.model.build import build_loss
from worker.step.replica import Replica

pytestmark = [
    pytest.mark.slow,
    # What Keras says of data with more keys than the model has inputs.
    pytest.mark.filterwarnings("ignore:The structure of `inputs`:UserWarning"),
]
layers = keras.layers
SPARSE = "sparse_categorical_crossentropy"


def house(**compiled: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
        h = layers.Concatenate()([a, b])
        price = layers.Dense(1, name="price")(h)
        kind = layers.Dense(3, activation="softmax", name="kind")(h)
        model = keras.Model({"a": a, "b": b}, {"price": price, "kind": kind})
        if compiled:
            model.compile(**compiled)
        return model

    return build


def in_a_list() -> keras.Model:
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    h = layers.Concatenate()([a, b])
    return keras.Model([a, b], [layers.Dense(1, name="price")(h), layers.Dense(3, name="kind")(h)])


class Called(keras.Model):  # type: ignore[misc]
    """Declares neither inputs nor outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.price, self.kind = layers.Dense(1), layers.Dense(3)

    def call(self, x: Any) -> Any:
        return {"price": self.price(x["a"]), "kind": self.kind(x["b"])}


class InTuple(Called):
    """Declares neither, and gives a tuple."""

    def call(self, x: Any) -> Any:
        return tuple(super().call(x).values())


def test_labels_of_an_output_are_checked_as_those_of_one() -> None:
    """Keras spreads ``[n, 1]`` over ``[n, 3]`` without a word."""
    for model in (house(), in_a_list):
        with pytest.raises(InvalidJob) as raised:
            described(
                model=model,
                loss={"price": "mse", "kind": "mse"},
                metrics=[],
                train=Arrays({"a": A, "b": B}, {"price": PRICE, "kind": PRICE}),
            )
        assert str(raised.value) == (
            "train: output 'kind': labels of shape (1,) per example do not fit the loss "
            "mean_squared_error and a model whose output has shape (3,); expected labels of shape "
            "(3,)"
        )


def test_a_list_of_losses_goes_by_the_sorted_names_of_outputs_in_a_dict() -> None:
    fields: dict[str, Any] = {"model": house(), "metrics": [], "train": data()}
    assert described(loss=[SPARSE, "mse"], **fields)["metrics"] == ["loss"]
    with pytest.raises(InvalidJob, match=r"train: output 'kind': labels of shape .* mean_squared_"):
        described(loss=["mse", SPARSE], **fields)


def test_an_error_of_a_loss_says_which_output_has_which() -> None:
    def own(_y: Any, _p: Any) -> Any:
        raise ValueError("no")

    with pytest.raises(UserCodeFailed) as raised:
        described(model=house(), loss=[own, "mse"], metrics=[], train=data())
    assert str(raised.value) == (
        "the loss raised ValueError: no; of the outputs 'kind' has own, 'price' has mse (a list "
        "goes by the sorted names of outputs in a dict)"
    )


def one(width: int = 4, units: int = 3) -> keras.Model:
    x = keras.Input((width,), name="x")
    return keras.Model(x, layers.Dense(units, activation="softmax", name="kind")(x))


def sequential(width: int = 4) -> keras.Model:
    return keras.Sequential([keras.Input((width,)), layers.Dense(3)])


A, B = np.ones((60, 4), np.float32), np.ones((60, 3), np.float32)
PRICE, KIND = np.ones((60, 1), np.float32), np.arange(60) % 3


def data(b: str = "b", kind: str = "kind") -> Arrays:
    return Arrays({"a": A, b: B}, {"price": PRICE, kind: KIND})


LOSS = {"price": "mse", "kind": SPARSE}
TWO: dict[str, Any] = {"model": house(), "loss": LOSS, "metrics": [], "train": data()}
IN_COMPILE: dict[str, Any] = {"loss": None, "optimizer": None, "metrics": []}
OUTPUTS = "but the model's outputs are 'price', 'kind'; did you mean 'kind'?"
WRONG_WEIGHTS = {"price": 0.5, "kimd": 2.0}


class OfDicts(keras.losses.Loss):  # type: ignore[misc]
    def call(self, y: Any, p: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(y["kind"], p)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss": {"price": "mse", "knd": SPARSE}}, f"loss in the job has the key 'knd', {OUTPUTS}"),
    (
        {**IN_COMPILE, "model": house(optimizer="sgd", loss={"price": "mse", "knd": SPARSE})},
        f"loss in compile() of the model has the key 'knd', {OUTPUTS}",
    ),
    (
        {"loss_weights": WRONG_WEIGHTS},
        f"loss_weights in the job has the key 'kimd', {OUTPUTS}",
    ),
    (
        {
            **IN_COMPILE,
            "model": house(optimizer="sgd", loss=LOSS, loss_weights=WRONG_WEIGHTS),
        },
        f"loss_weights in compile() of the model has the key 'kimd', {OUTPUTS}",
    ),
    (
        {"model": in_a_list, "loss_weights": WRONG_WEIGHTS},
        f"loss_weights in the job has the key 'kimd', {OUTPUTS}",
    ),
    (
        {"model": Called, "loss_weights": WRONG_WEIGHTS},
        f"loss_weights in the job has the key 'kimd', {OUTPUTS}",
    ),
    (
        {"loss": {"price": "mse"}, "loss_weights": {"kind": 2.0}},
        "loss_weights in the job has the key 'kind', for which there is no loss; loss has 'price'",
    ),
    (
        {"loss": "mse", "loss_weights": {"kind": 2.0}},
        "loss_weights in the job has the keys 'kind', but loss is not given by output; give a dict",
    ),
    ({"metrics": {"kid": ["mae"]}}, f"metrics in the job has the key 'kid', {OUTPUTS}"),
    ({"train": data(kind="kin")}, f"train: the labels have the key 'kin', {OUTPUTS}"),
    ({"eval": data(kind="kin")}, f"eval: the labels have the key 'kin', {OUTPUTS}"),
    (
        {"train": Arrays({"a": A, "b": B}, {"price": PRICE})},
        "train: there are no labels for the output 'kind'; their keys are 'price'",
    ),
    (
        {"train": data(b="bb")},
        "train: x of the data has no 'b'; its keys are 'a', 'bb', and the inputs of the model are "
        "'a', 'b'",
    ),
    (
        {"train": Arrays({"a": A, "b": B}, KIND)},
        "train: the labels are one array of shape [n], but the model has 2 outputs, 'price', 'kind'"
        "; give one array for each: y={'price': ..., 'kind': ...}",
    ),
    (
        {"model": in_a_list, "train": Arrays({"a": A, "b": B}, B)},
        "train: the labels are one array of shape [n, 3], but the model has 2 outputs, 'price', 'k",
    ),
    (
        {"model": InTuple, "loss": "mse", "train": Arrays({"a": A, "b": B}, B)},
        "[n, 3], but the model has 2 outputs; give one array for each: y=(..., ...)",
    ),
    (
        {"eval": Arrays({"a": A, "b": B}, KIND)},
        "eval: the labels are one array of shape [n], but the model has 2 outputs, 'price', 'kind'",
    ),
    (
        {"model": in_a_list, "train": Arrays({"a": A, "b": B}, [PRICE, KIND, KIND])},
        "train: the labels are 3 arrays, but the model has 2 outputs, 'price', 'kind'; give one",
    ),
    (
        {"metrics": ["accuracy"]},
        "metrics in the job is ['accuracy'], but the model has 2 outputs, 'price', 'kind'; say "
        "which are of which: metrics={'price': [...], 'kind': [...]}",
    ),
    (
        {
            **IN_COMPILE,
            "model": house(optimizer="sgd", loss=LOSS, metrics=["mae", "mse", "mape"]),
        },
        "metrics in compile() of the model is ['mae', 'mse', 'mape'], but the model has 2 outputs",
    ),
    ({"model": in_a_list, "metrics": ["accuracy"]}, "metrics={'price': [...], 'kind': [...]}"),
    (
        {"metrics": ["mae", "accuracy"]},
        "of the outputs 'kind' has [mae], 'price' has [accuracy] (a list goes by the sorted names",
    ),
    (
        {"loss": ["mse", "mse", "mse"]},
        "loss in the job is ['mse', 'mse', 'mse'], but the model has 2 outputs, 'price', 'kind'; "
        "say which are of which: loss={'price': ..., 'kind': ...}",
    ),
    ({"eval": data(b="bb")}, "eval: x of the data has no 'b'; its keys are 'a', 'bb', and"),
]


@pytest.mark.parametrize(("fields", "says"), REFUSED)
def test_a_key_that_the_model_does_not_have_is_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidJob) as raised:
        described(**{**TWO, **fields})
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


ALONE: list[tuple[dict[str, Any], str]] = [
    (
        {"model": sequential, "loss": {"outptu": SPARSE}},
        "loss in the job has the keys 'outptu', but the model has one output, which has no name; "
        "give the loss itself",
    ),
    (
        {"model": one, "loss": {"kimd": SPARSE}},
        "loss in the job has the key 'kimd', but the model's output is 'kind'; did you ",
    ),
    (
        {"model": lambda: sequential(9), "loss": SPARSE},
        "the model raised ValueError",
    ),
    (
        {"model": lambda: sequential(9), "loss": SPARSE},
        "(2, 4); x of the data has shape [n, 4], the input takes [n, 9]",
    ),
    (
        {"model": lambda: one(9), "loss": SPARSE, "train": Arrays({"x": A}, KIND)},
        "x['x'] of the data has shape [n, 4], the input takes [n, 9]",
    ),
    (
        {"model": one, "loss": SPARSE, "metrics": ["auc"]},
        "metric auc raised ",
    ),
    (
        {"model": one, "loss": SPARSE, "train": Arrays(A, {"kind": KIND})},
        "train: the labels are a dict with the keys 'kind', but the model has one output; give one",
    ),
    (
        {"model": one, "loss": {"kind": SPARSE}, "train": Arrays(A, {"kind": KIND})},
        "train: the labels are a dict with the keys 'kind', but the model has one output; give one",
    ),
    (
        {"model": one, "loss": SPARSE, "train": Arrays(A, [KIND, KIND])},
        "train: the labels are 2 arrays in a list, but the model has one output; give one array as",
    ),
    (
        {"model": one, "loss": SPARSE, "metrics": ["auc"]},
        "labels have shape [n], the output [n, 3]: metrics take labels of the output's shape; ",
    ),
]


@pytest.mark.parametrize(("fields", "says"), ALONE)
def test_a_model_of_one_output(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidJob) as raised:
        described(**{"metrics": [], "train": Arrays(A, KIND), **fields})
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"loss_weights": {"kind": 2.0, "price": 0.5}, "metrics": {"kind": ["accuracy"]}},
        {"model": in_a_list, "loss_weights": {"kind": 2.0, "price": 0.5}},
        {"model": Called, "metrics": {"kind": ["accuracy"]}},
        {"loss": {"price": "mse"}, "train": Arrays({"a": A, "b": B}, {"price": PRICE})},
        {"loss": {"price": "mse", "kind": None}},
        {"train": Arrays({"a": A, "b": B, "more": A}, {"price": PRICE, "kind": KIND})},
        {"model": in_a_list, "train": Arrays([A, B], [PRICE, KIND]), "loss": ["mse", SPARSE]},
        {"model": one, "train": Arrays(A, KIND), "loss": {"kind": SPARSE}},
        {"model": one, "train": Arrays({"x": A}, KIND), "loss": SPARSE},
        {"model": one, "train": Arrays(A, {"kind": KIND}), "loss": OfDicts()},
        {"metrics": ["accuracy", "mae"]},
        {
            "model": in_a_list,
            "loss": ["mse", None],
            "train": Arrays([A, B], [PRICE]),
            "eval": Arrays([A, B], [PRICE, KIND]),
        },
    ],
)
def test_keys_that_fit(fields: dict[str, Any]) -> None:
    assert described(**{**TWO, **fields})["train_records"] == 60


LABELS = {"price": PRICE, "kind": KIND}
WEIGHTS = np.linspace(0.0, 2.0, 60, dtype=np.float32)


def weighed(weights: Any) -> Arrays:
    return Arrays({"a": A, "b": B}, LABELS, weights)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"train": weighed({"price": WEIGHTS, "kid": WEIGHTS})},
            f"train: the sample weights have the key 'kid', {OUTPUTS}",
        ),
        (
            {"train": weighed({"price": WEIGHTS})},
            "train: there are no sample weights for the output 'kind'; their keys are 'price'; ",
        ),
        (
            {"eval": weighed({"price": WEIGHTS})},
            "eval: there are no sample weights for the output 'kind'",
        ),
        (
            {"train": weighed([WEIGHTS] * 3)},
            "train: the sample weights are 3 arrays, but the model has 2 outputs, 'price', 'kind'; "
            "give one array for all, or one for each: sample_weight={'price': ..., 'kind': ...}",
        ),
        (
            {"train": weighed(np.ones((60, 7), np.float32))},
            "train: output 'price': sample weights of shape [n, 7] do not fit the loss "
            "mean_squared_error, which has shape [n] for a model whose output has shape [n, 1]; "
            "expected [n]",
        ),
        (
            {"train": weighed({"price": WEIGHTS, "kind": np.ones((60, 7), np.float32)})},
            "train: output 'kind': sample weights of shape [n, 7] do not fit the loss sparse_categ",
        ),
        (
            # As many as the records of a batch: TensorFlow would multiply them.
            {"model": in_a_list, "eval": weighed([WEIGHTS, np.ones((60, 10), np.float32)])},
            "eval: output 'kind': sample weights of shape [n, 10] do not fit",
        ),
        (
            {"model": one, "loss": SPARSE, "train": Arrays(A, KIND, {"kind": WEIGHTS})},
            "train: the sample weights are a dict with the keys 'kind', but the model has one",
        ),
    ],
)
def test_sample_weights_that_are_not_those_of_the_outputs(
    fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidJob) as raised:
        described(**{**TWO, **fields})
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("nest", [dict, list, None])
@pytest.mark.parametrize("model", [house(), in_a_list, Called], ids=["dict", "list", "own class"])
def test_sample_weights_of_outputs_are_multiplied_as_keras_does(
    model: Callable[[], keras.Model], nest: type | None
) -> None:
    by_name = {"price": WEIGHTS, "kind": WEIGHTS[::-1].copy()}
    in_order = ["price", "kind"] if model is in_a_list else sorted(by_name)
    weights: Any = WEIGHTS if nest is None else by_name
    if nest is list:
        weights = [by_name[name] for name in in_order]
    made = make_job(**{**TWO, "model": model, "train": weighed(weights)})
    built = Replica(made)
    batch = built.job.train.read_range(0, 30)
    outputs = built.model(batch[0])
    found = build_loss(built.job, built.model)(map_arrays(as_tensor, batch), outputs, False)
    if isinstance(outputs, list):
        outputs = dict(zip(["price", "kind"], outputs, strict=True))
    expected = 0.0
    for name, loss in (("price", keras.losses.get("mse")), ("kind", keras.losses.get(SPARSE))):
        each = np.asarray(loss(batch[1][name], outputs[name]))
        expected += float(np.mean(each * (WEIGHTS if nest is None else by_name[name])[:30]))
    assert float(found) == pytest.approx(expected, rel=1e-5)
