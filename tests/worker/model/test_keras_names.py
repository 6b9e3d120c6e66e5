"""Names that Keras does not have, and the nearest that it has."""

from __future__ import annotations

import pytest

from psrpc.core.errors import InvalidJob
from worker.model.keras_names import Kind, get


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("loss", "sparse_crossentropy", "did you mean 'sparse_categorical_crossentropy'?"),
        ("loss", "SparseCrossEntropy", "did you mean 'sparse_categorical_crossentropy'?"),
        ("loss", "sparse_cross_entropy", "did you mean 'sparse_categorical_crossentropy'?"),
        ("loss", "binary_cross_entropy", "did you mean 'binary_crossentropy'?"),
        ("loss", "CrossEntropyLoss", "did you mean 'crossentropy'?"),
        ("loss", "mse_loss", "did you mean 'mse'?"),
        ("loss", "MSELoss", "did you mean 'mse'?"),
        ("loss", "bce_with_logits", "did you mean 'bce'?"),
        ("loss", "kl_div", "did you mean 'kl_divergence'?"),
        ("loss", "squared_error", "did you mean 'mean_squared_error'?"),
        ("loss", "acc", "it is the name of a metric"),
        ("loss", "adam", "it is the name of an optimizer"),
        ("metric", "f1", "did you mean 'f1_score'?"),
        ("metric", "r2", "did you mean 'r2_score'?"),
        ("metric", "sparse_accuracy", "did you mean 'sparse_categorical_accuracy'?"),
        ("metric", "top_k_accuracy", "did you mean 'top_k_categorical_accuracy'?"),
        ("metric", "categorical_acc", "did you mean 'categorical_accuracy'?"),
        ("metric", "accuracy_score", "did you mean 'accuracy'?"),
        ("metric", "roc_auc", "did you mean 'auc'?"),
        ("metric", "mean_crossentropy", "did you mean 'binary_crossentropy'?"),
        ("optimizer", "adamw2", "did you mean 'adamw'?"),
        ("optimizer", "adma", "did you mean 'adam'?"),
        ("optimizer", "sgd_momentum", "did you mean 'sgd'?"),
    ],
)
def test_the_nearest_name_has_the_same_words(kind: Kind, name: str, says: str) -> None:
    with pytest.raises(InvalidJob) as raised:
        get(kind, name)
    assert str(raised.value).endswith(f"Keras has no {kind} of that name; {says}")
