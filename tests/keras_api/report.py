"""``docs/keras.md``: what of Keras trains, and what does not and why."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

import keras

from tests.keras_api.spectral import SpectralDense


@dataclass(frozen=True)
class Outcome:
    """Of one class.

    Attributes:
        name: in ``keras.layers`` or ``keras.optimizers``, or that and its arguments.
        aliases: its other names there.
        state: names of what is kept beside what is trained.
        refused: why; empty if it trains.
        note: what else there is to say.
    """

    name: str
    aliases: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    refused: str = ""
    note: str = ""

    @property
    def shown(self) -> str:
        """Its names."""
        first, *arguments = self.name.split(", ", 1)
        names = ", ".join(f"`{name}`" for name in (first, *self.aliases))
        return f"{names} ({arguments[0]})" if arguments else names


LAYERS: list[Outcome] = []
OPTIMIZERS: list[Outcome] = []
"""What the tests have seen."""


def document(layers: Iterable[Outcome], optimizers: Iterable[Outcome]) -> str:
    """The whole file."""
    layers, optimizers = _sorted(layers), _sorted(optimizers)
    plain = [each for each in layers if not each.refused and not each.state]
    carried = [f"| {each.shown} | {_code(each.state)} |" for each in layers if each.state]
    refused = [f"| {each.shown} | {each.refused} |" for each in layers if each.refused]
    updates = [
        f"| {each.shown} | {each.note} | {each.refused or _code(each.state)} |"
        for each in optimizers
    ]
    wrapper = textwrap.TextWrapper(100, break_on_hyphens=False, break_long_words=False)
    listed = ", ".join(each.shown for each in plain)
    return PAGE.format(
        version=keras.__version__,
        count=len(plain),
        plain=wrapper.fill(f"{listed}."),
        carried="\n".join(carried),
        refused="\n".join(refused),
        updates="\n".join(updates),
        spectral=inspect.getsource(SpectralDense).replace("  # type: ignore[misc]", "").strip(),
    )


def _sorted(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return sorted(outcomes, key=lambda each: each.name)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


PAGE = """# Keras: what trains, and what does not

Made by `make keras`, here with Keras {version}. Each class of `keras.layers`, in its smallest use,
is described as `worker describe` does, trained for three steps on two shards, and compared with
plain Keras in one process, with the same random numbers; each class of `keras.optimizers` likewise.
What is not on this page is either not of Keras or newer than this page: the command fails where a
class neither trains nor is refused with a reason.

## Layers

These {count} train as in plain Keras:

{plain}

These as well, with state that is not trained. Floats of it travel as differences, integers and
booleans as values, see [consistency.md](consistency.md#async):

| layer | state |
| --- | --- |
{carried}

These do not:

| layer | why |
| --- | --- |
{refused}

`SpectralNormalization` writes the kernel that the optimizer updates. The same as its paper has it
(Miyato et al. 2018) trains: a layer that computes with the kernel divided by its largest singular
value, and has the gradient of that.

```python
{spectral}
```

## Optimizers

| optimizer | needs | slots, or why not |
| --- | --- | --- |
{updates}

Of an id that a batch has several times `keras.layers.Embedding` gives a gradient for each time. The
shards get their sum, as of any other variable, and so it is with tables of `worker.Embedding`.
`fit` does not add them up first: optimizers that keep squares of gradients (Adam, RMSprop, Adagrad,
...) add the square of each there, not the square of the sum, so rows of frequent ids take other
steps than here. With SGD, with or without momentum, only the last digits differ, by the order of
additions.

## Models of your own

- Variables are float32, float64, integers or booleans. Integers and booleans are never trained.
- Variables go by their `path`. Where several have one path, as layers of a saved model that is
  loaded twice, or of one and of its head, the second and those after it are numbered in the order
  of `model.weights`: `dense/kernel`, `dense/kernel#2`. Checkpoints have these names.
- A forward pass may assign weights that are not trained. Where it assigns trained ones, or
  variables that are not the model's, it is refused ([PS108](errors.md#ps108)).
- A `tf.function` within the forward pass that reads variables is refused: workers compile the whole
  step. So are custom gradients and `keras.remat` of functions that read variables which are not
  among their arguments, and layers quantized to float8.
- The step is compiled (`tf.function`): in `call` and in a loss tensors have no values yet, so
  `.numpy()`, `float()`, `bool()` and NumPy's functions cannot be used; use `keras.ops`.
- Random numbers come from a `keras.random.SeedGenerator` that is an attribute of a layer, as those
  of Keras's layers do. Workers set its state by the batch, so a batch that is done again draws the
  same. `keras.random` without a seed and `tf.random` are refused.
- Metrics that are attributes of layers are evaluated, as `fit` evaluates them, beside those of the
  job. In training they are not read.
- `stateful=True` is refused: batches come in another order, and to several workers.
- Tables of `StringLookup`, `IntegerLookup`, `TextVectorization` and boundaries of `Discretization`
  are no variables: each process builds them with the model. Give a vocabulary, or adapt to the same
  data everywhere. Means of `Normalization` are variables, and the same everywhere.
- Overridden methods that workers do not call are refused ([PS108](errors.md#ps108)): `fit`,
  `evaluate`, `train_step`, `test_step`, `make_train_function`, `make_test_function` and
  `compute_metrics`. `compute_loss` is called. `predict` and `predict_step` may be overridden: a job
  predicts nothing.
"""
