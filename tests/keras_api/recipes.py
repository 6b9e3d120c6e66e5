"""The smallest use of every class in ``keras.layers``: data, and what makes of it some numbers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from worker.data.source import Array

layers = keras.layers

RECORDS = 24
WORDS = ["red", "green", "blue", "grey"]


@dataclass(frozen=True)
class Recipe:
    """``data`` is what the model takes, ``use`` what the layer makes of its inputs."""

    data: Array | Mapping[str, Array]
    use: Callable[[Any], Any]


def floats(*shape: int, low: float = -1.0, high: float = 1.0) -> Array:
    generator = np.random.default_rng(len(shape))
    return generator.uniform(low, high, (RECORDS, *shape)).astype(np.float32)


def ids(*shape: int, count: int = 9) -> Array:
    return np.random.default_rng(3).integers(0, count, (RECORDS, *shape))


VECTOR, SEQUENCE, IMAGE = floats(6), floats(4, 3), floats(8, 8, 3, low=0.0, high=255.0)
GREY = floats(8, 8, 1, low=0.0, high=255.0)
SMALL_IMAGE, VOLUME = floats(6, 6, 2), floats(4, 4, 4, 2)
WORD = np.array(WORDS)[ids(1, count=4)]


def using(make: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda x: make()(x)


def merging(make: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda x: make()([layers.Dense(4)(x), layers.Dense(4)(x)])


def each(data: Array, **made: Callable[[], Any]) -> dict[str, Recipe]:
    """Layers that take one tensor."""
    return {name: Recipe(data, using(make)) for name, make in made.items()}


def of_defaults(data: Array, *names: str) -> dict[str, Recipe]:
    """Those that need no arguments."""
    return {name: Recipe(data, using(getattr(layers, name))) for name in names}


def of_two(*names: str, **made: Callable[[], Any]) -> dict[str, Recipe]:
    """Layers that merge two tensors."""
    makers = {name: getattr(layers, name) for name in names} | made
    return {name: Recipe(VECTOR, merging(make)) for name, make in makers.items()}


def of_sizes(kind: str, sizes: tuple[int, ...], **arguments: Any) -> dict[str, Recipe]:
    """The same layer in one, two or three dimensions."""
    data = {1: SEQUENCE, 2: SMALL_IMAGE, 3: VOLUME}
    return {
        name: Recipe(data[size], using(partial(getattr(layers, name), **arguments)))
        for size in sizes
        for name in [kind.replace("*", f"{size}D")]
    }


def adapted(layer: Any, data: Array) -> Any:
    layer.adapt(data)
    return layer


def attending(make: Callable[[], Any]) -> Recipe:
    return Recipe(SEQUENCE, lambda x: make()(x, layers.Dense(3)(x)))


def mixing(make: Callable[[], Any]) -> Recipe:
    data = {"images": IMAGE, "labels": np.eye(2, dtype=np.float32)[ids(count=2)]}
    return Recipe(data, lambda x: make()(x)["images"])


class Doubling(tf.Module):  # type: ignore[misc]  # TensorFlow has no types
    """The model that a SavedModel is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = tf.Variable(2.0)
        signature = [tf.TensorSpec([None, 6])]
        self.serve = tf.function(lambda x: self.factor * x, input_signature=signature)


SAVED = tempfile.TemporaryDirectory()


def saved_model() -> str:
    """The directory of a SavedModel."""
    tf.saved_model.save(Doubling(), SAVED.name)
    return SAVED.name


def ends(x: Any) -> Any:
    """Sequences that end before the last two steps."""
    return layers.ZeroPadding1D((0, 2))(x)


def pooled(layer: Any) -> Callable[[Any], Any]:
    return lambda x: layers.GlobalAveragePooling2D()(layer(x))


def quantized(layer: Any) -> Callable[[Any], Any]:
    def use(x: Any) -> Any:
        layer.build(x.shape)
        layer.quantize("int8")
        return layer(x)

    return use


class Own(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """A user's class derived from ``Layer``: it has a weight of its own."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.built = True

    def call(self, x: Any) -> Any:
        return x * self.scale


def boxes(x: Any) -> Any:
    found = layers.MaxNumBoundingBoxes(4, bounding_box_format="xyxy")(
        {"images": x["images"], "bounding_boxes": {"boxes": x["boxes"], "labels": x["classes"]}}
    )
    return found["bounding_boxes"]["boxes"]


RECIPES: dict[str, Recipe] = {
    **of_defaults(
        VECTOR, "ELU", "Flatten", "Identity", "LayerNormalization", "LeakyReLU", "PReLU", "ReLU"
    ),
    **of_defaults(VECTOR, "RMSNormalization", "Softmax", "UnitNormalization", "BatchNormalization"),
    **each(
        VECTOR,
        Activation=lambda: layers.Activation("tanh"),
        ActivityRegularization=lambda: layers.ActivityRegularization(0.1),
        AlphaDropout=lambda: layers.AlphaDropout(0.5),
        Dense=lambda: layers.Dense(4),
        Dropout=lambda: layers.Dropout(0.5),
        EinsumDense=lambda: layers.EinsumDense("ab,bc->ac", output_shape=4, bias_axes="c"),
        GaussianDropout=lambda: layers.GaussianDropout(0.5),
        GaussianNoise=lambda: layers.GaussianNoise(0.5),
        GroupNormalization=lambda: layers.GroupNormalization(3),
        Lambda=lambda: layers.Lambda(lambda x: 2 * x),
        Layer=Own,
        Normalization=lambda: adapted(layers.Normalization(), 3 + VECTOR),
        Pipeline=lambda: layers.Pipeline([layers.Rescaling(0.5), layers.Dense(3)]),
        RepeatVector=lambda: layers.RepeatVector(2),
        Rescaling=lambda: layers.Rescaling(0.5),
        Reshape=lambda: layers.Reshape((2, 3)),
        SpectralNormalization=lambda: layers.SpectralNormalization(layers.Dense(3)),
        Wrapper=lambda: Wrapped(layers.Dense(3)),
        Discretization=lambda: layers.Discretization(bin_boundaries=[-0.5, 0.0, 0.5]),
        JaxLayer=lambda: layers.JaxLayer(lambda x: x),
        FlaxLayer=lambda: layers.FlaxLayer(object()),
        TorchModuleWrapper=lambda: layers.TorchModuleWrapper(object()),
        TFSMLayer=lambda: layers.TFSMLayer(saved_model(), "serve", trainable=False),
    ),
    **each(
        SEQUENCE,
        Bidirectional=lambda: layers.Bidirectional(layers.LSTM(2)),
        GRU=lambda: layers.GRU(2, dropout=0.2, recurrent_dropout=0.2),
        GRUCell=lambda: layers.RNN(layers.GRUCell(2)),
        LSTM=lambda: layers.LSTM(2, dropout=0.2),
        LSTMCell=lambda: layers.RNN(layers.LSTMCell(2)),
        Masking=lambda: lambda x: layers.LSTM(2)(layers.Masking()(ends(x))),
        Permute=lambda: layers.Permute((2, 1)),
        RNN=lambda: layers.RNN([layers.GRUCell(2), layers.SimpleRNNCell(2)]),
        SimpleRNN=lambda: layers.SimpleRNN(2),
        SimpleRNNCell=lambda: layers.RNN(layers.SimpleRNNCell(2)),
        StackedRNNCells=lambda: layers.RNN(
            layers.StackedRNNCells([layers.LSTMCell(2), layers.LSTMCell(2)])
        ),
        TimeDistributed=lambda: layers.TimeDistributed(layers.Dense(2)),
    ),
    **of_two("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract"),
    **of_two(Dot=lambda: layers.Dot(-1)),
    "AdditiveAttention": Recipe(
        SEQUENCE, lambda x: layers.AdditiveAttention()([x, layers.Dense(3)(x)])
    ),
    "Attention": Recipe(
        SEQUENCE, lambda x: layers.Attention(use_scale=True)([x, layers.Dense(3)(x)])
    ),
    "GroupQueryAttention": attending(lambda: layers.GroupQueryAttention(3, 2, 1, dropout=0.1)),
    "MultiHeadAttention": attending(lambda: layers.MultiHeadAttention(2, 3, dropout=0.1)),
    "InputLayer": Recipe(VECTOR, lambda x: x),
    **of_sizes("AdaptiveAveragePooling*", (1, 2, 3), output_size=2),
    **of_sizes("AdaptiveMaxPooling*", (1, 2, 3), output_size=2),
    **of_sizes("AveragePooling*", (1, 2, 3), pool_size=2),
    **of_sizes("MaxPooling*", (1, 2, 3)),
    **of_sizes("Conv*", (1, 2, 3), filters=2, kernel_size=2),
    **of_sizes("Conv*Transpose", (1, 2, 3), filters=2, kernel_size=2),
    **of_sizes("Cropping*", (1, 2, 3)),
    **of_sizes("DepthwiseConv*", (1, 2), kernel_size=2),
    **of_sizes("GlobalAveragePooling*", (1, 2, 3)),
    **of_sizes("GlobalMaxPooling*", (1, 2, 3)),
    **of_sizes("SeparableConv*", (1, 2), filters=2, kernel_size=2),
    **of_sizes("SpatialDropout*", (1, 2, 3), rate=0.5),
    **of_sizes("UpSampling*", (1, 2, 3)),
    **of_sizes("ZeroPadding*", (1, 2, 3)),
    **each(floats(3, 6, 2), ConvLSTM1D=lambda: layers.ConvLSTM1D(2, 2)),
    **each(floats(3, 4, 4, 2), ConvLSTM2D=lambda: layers.ConvLSTM2D(2, 2)),
    **each(floats(2, 3, 3, 3, 2), ConvLSTM3D=lambda: layers.ConvLSTM3D(2, 2)),
    **each(
        ids(4),
        CategoryEncoding=lambda: layers.CategoryEncoding(9),
        Embedding=lambda: layers.Embedding(9, 3),
        Hashing=lambda: layers.Hashing(5),
        IntegerLookup=lambda: layers.IntegerLookup(vocabulary=[3, 1, 4]),
        ReversibleEmbedding=lambda: layers.ReversibleEmbedding(9, 3),
    ),
    **each(
        WORD,
        StringLookup=lambda: layers.StringLookup(vocabulary=WORDS),
        TextVectorization=lambda: layers.TextVectorization(
            vocabulary=WORDS, output_sequence_length=2
        ),
    ),
    "HashedCrossing": Recipe(
        {"one": ids(), "other": ids()},
        lambda x: layers.HashedCrossing(5, output_mode="one_hot")((x["one"], x["other"])),
    ),
    **each(
        floats(64),
        MelSpectrogram=lambda: layers.MelSpectrogram(
            16, 8, 16, sampling_rate=100, num_mel_bins=4, min_freq=1
        ),
    ),
    **each(
        floats(64, 1),
        STFTSpectrogram=lambda: layers.STFTSpectrogram(frame_length=16, fft_length=16),
    ),
    **of_defaults(
        IMAGE,
        "AugMix",
        "AutoContrast",
        "ContrastLimitedAdaptiveHistogramEqualization",
        "Equalization",
        "RandAugment",
        "RandomErasing",
        "RandomFlip",
        "RandomGaussianBlur",
        "RandomGrayscale",
        "RandomInvert",
        "RandomPerspective",
        "RandomShear",
        "Solarization",
    ),
    # Of each channel of each image it makes a graph of its own.
    **of_defaults(GREY, "RandomElasticTransform"),
    **each(
        IMAGE,
        CenterCrop=lambda: layers.CenterCrop(4, 4),
        RandomBrightness=lambda: layers.RandomBrightness(0.5),
        RandomColorDegeneration=lambda: layers.RandomColorDegeneration(0.5),
        RandomColorJitter=lambda: layers.RandomColorJitter(
            brightness_factor=0.5, contrast_factor=0.5, saturation_factor=0.5, hue_factor=0.5
        ),
        RandomContrast=lambda: layers.RandomContrast(0.5),
        # Only in training it makes images smaller.
        RandomCrop=lambda: pooled(layers.RandomCrop(4, 4)),
        RandomHue=lambda: layers.RandomHue(0.5),
        RandomPosterization=lambda: layers.RandomPosterization(4),
        RandomRotation=lambda: layers.RandomRotation(0.5),
        RandomSaturation=lambda: layers.RandomSaturation(0.5),
        RandomSharpness=lambda: layers.RandomSharpness(0.5),
        RandomTranslation=lambda: layers.RandomTranslation(0.5, 0.5),
        RandomZoom=lambda: layers.RandomZoom(0.5),
        Resizing=lambda: layers.Resizing(4, 4),
    ),
    "CutMix": mixing(layers.CutMix),
    "MixUp": mixing(layers.MixUp),
    "MaxNumBoundingBoxes": Recipe(
        {"images": IMAGE, "boxes": floats(6, 4), "classes": ids(6)}, boxes
    ),
}


VARIANTS: dict[str, Recipe] = {
    **{
        f"BatchNormalization, {name}": Recipe(IMAGE / 255, using(make))
        for name, make in {
            "renorm": lambda: layers.BatchNormalization(renorm=True),
            "synchronized": lambda: layers.BatchNormalization(synchronized=True),
        }.items()
    },
    "Dense, lora_rank": Recipe(VECTOR, lambda x: layers.Dense(4, lora_rank=2)(x)),
    "Dense, int8": Recipe(VECTOR, lambda x: quantized(layers.Dense(4))(x)),
    "Embedding, int8": Recipe(ids(4), lambda x: quantized(layers.Embedding(9, 3))(x)),
    "Normalization, axis=None": Recipe(
        VECTOR, lambda x: adapted(layers.Normalization(axis=None), 3 + VECTOR)(x)
    ),
    "Normalization, mean and variance": Recipe(
        VECTOR, lambda x: layers.Normalization(mean=0.5, variance=2.0)(x)
    ),
    "Discretization, adapted": Recipe(
        VECTOR, lambda x: adapted(layers.Discretization(num_bins=3), VECTOR)(x)
    ),
    "IntegerLookup, adapted": Recipe(ids(4), lambda x: adapted(layers.IntegerLookup(), ids(4))(x)),
    "StringLookup, adapted": Recipe(WORD, lambda x: adapted(layers.StringLookup(), WORD)(x)),
    "TextVectorization, tf_idf": Recipe(
        WORD, lambda x: adapted(layers.TextVectorization(6, output_mode="tf_idf"), WORD[:, 0])(x)
    ),
    "TFSMLayer, trainable": Recipe(VECTOR, lambda x: layers.TFSMLayer(saved_model(), "serve")(x)),
    "GRU, unrolled": Recipe(SEQUENCE, lambda x: layers.GRU(2, unroll=True)(x)),
}
"""Arguments that give a layer other state."""


class Wrapped(keras.layers.Wrapper):  # type: ignore[misc]
    """A user's class derived from ``Wrapper``."""

    def call(self, x: Any) -> Any:
        return 0.5 * self.layer(x)


def model_of(recipe: Recipe) -> keras.Model:
    """The layer's numbers, through one dense layer, beside the mean of the inputs: so there is
    always something to train."""

    def declared(array: Array, name: str) -> Any:
        dtype = "string" if array.dtype.kind == "U" else str(array.dtype)
        return keras.Input(array.shape[1:], dtype=dtype, name=name)

    if isinstance(recipe.data, Mapping):
        inputs = {name: declared(array, name) for name, array in recipe.data.items()}
    else:
        inputs = declared(recipe.data, "x")
    made = keras.ops.cast(recipe.use(inputs), "float32")
    if recipe.data is IMAGE or recipe.data is GREY or isinstance(recipe.data, Mapping):
        made = made / 255.0
    return keras.Model(inputs, layers.Dense(2, name="last")(layers.Flatten()(made)))


def public_layers() -> dict[str, list[str]]:
    """Every layer in ``keras.layers`` by the name of its class, with its other names."""
    found: dict[str, list[str]] = {}
    for name, value in sorted(vars(layers).items()):
        if isinstance(value, type) and issubclass(value, layers.Layer):
            own = value.__name__ if hasattr(layers, value.__name__) else name
            aliases = found.setdefault(own, [])
            if name != own:
                aliases.append(name)
    return found
