"""Names that Keras, TensorFlow or command lines have for what a job has under another one."""

from __future__ import annotations

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
"""What there is instead, in a sentence; of none of these a job has a field."""
