"""Chooses a worker's device, and moves tensors to it and back."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan, aligned_empty
from worker.data.ragged import as_tensor
from worker.data.source import Array, Batch, map_arrays

HOST = "/CPU:0"


@dataclass(frozen=True)
class Device:
    """The device that computes steps: ``name`` is for TensorFlow, ``label`` for people. ``others``
    are further devices over which a model may be spread (``worker.model.placement``)."""

    name: str
    label: str
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All devices, for TensorFlow."""
        return (self.name, *self.others)

    @property
    def each(self) -> tuple[Device, ...]:
        """Its devices, each as one by itself."""
        return tuple(Device(name, self.label) for name in self.names)

    @property
    def is_host(self) -> bool:
        """Whether its tensors are in the memory that NumPy and gRPC use."""
        return self.name == HOST

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which TensorFlow calls run on this device."""
        return contextlib.nullcontext() if self.is_host else tf.device(self.name)

    def edge(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context for the operations of a step that cut parameters and join gradients.
        With several devices these run on the host, from which each device takes its part: the whole
        may be larger than the memory of any device."""
        return tf.device(HOST) if self.others else contextlib.nullcontext()

    def receive(self, tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        """Copies ``tensors`` from the host to this device. Returns them as they are if the host is
        this device, or if there are several: then each device takes its part from the host."""
        here = self.is_host or self.others
        return tuple(tensors) if here else tuple(map(self._copy, tensors))

    def send(self, tensor: tf.Tensor) -> tf.Tensor:
        """Copies ``tensor`` from this device to the host; returns it as it is if the host is this
        device."""
        if self.is_host:
            return tensor
        with tf.device(HOST):
            return tf.identity(tensor)

    def take(self, batch: Batch) -> Batch:
        """Copies the tensors of a batch from the host to this device; returns them as they are if
        the host is this device. Any thread may call it."""
        if self.is_host:
            return batch
        taken: Batch = tf.nest.map_structure(self._copy, batch, expand_composites=True)
        return taken

    def place(self, batch: Batch) -> Batch:
        """Converts a batch of arrays to tensors on this device, :class:`Ragged` to ragged tensors.
        Any thread may call it."""

        # One scope for all arrays: entering it takes as long as converting a small array.
        with tf.device(HOST):
            placed: Batch = map_arrays(as_tensor, batch)
        return self.take(placed)

    def _copy(self, tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(self.name):
            return tf.identity(tensor)


def configure_devices(
    gpu: str,
    *,
    cpus: int = 1,
    memory_fraction: float | None = None,
    intra_op_threads: int | None = None,
) -> Device:
    """Chooses the devices and configures TensorFlow; once per process, before the first op.

    Args:
        gpu: see :func:`choose_gpus`.
        cpus: number of devices that the CPU is divided into; more than 1 leaves GPUs out.
        memory_fraction: limit as a fraction of the GPU's memory; None lets it grow as needed.
        intra_op_threads: threads of one operation; None leaves it to TensorFlow.

    Raises:
        InvalidArgument: the GPU does not exist, or a value is out of range.
    """
    if intra_op_threads is not None:
        if intra_op_threads < 1:
            raise InvalidArgument(f"--intra-op-threads is {intra_op_threads}; expected at least 1")
        tf.config.threading.set_intra_op_parallelism_threads(intra_op_threads)
    if memory_fraction is not None and not 0 < memory_fraction <= 1:
        raise InvalidArgument(
            f"--gpu-memory-fraction is {memory_fraction}; expected more than 0 and at most 1"
        )
    gpus = tf.config.list_physical_devices("GPU")
    chosen = [gpus[index] for index in choose_gpus(gpu, len(gpus))] if cpus == 1 else []
    if gpus:
        tf.config.set_visible_devices(chosen, "GPU")
    if not chosen:
        return _divided_cpu(cpus)
    if memory_fraction is not None and len(chosen) > 1:
        raise InvalidArgument(
            f"--gpu-memory-fraction is of one GPU, and --gpu {gpu} has {len(chosen)}; leave it out "
            "to let memory grow as needed"
        )
    for each in chosen:
        if memory_fraction is None:
            tf.config.experimental.set_memory_growth(each, True)
        else:
            limit_mb = int(_total_memory_bytes(each) * memory_fraction) >> 20
            tf.config.set_logical_device_configuration(
                each, [tf.config.LogicalDeviceConfiguration(memory_limit=limit_mb)]
            )
    labels = [_label(each) for each in chosen]
    # TensorFlow numbers the visible GPUs from 0.
    first, *others = [f"/GPU:{index}" for index in range(len(chosen))]
    return Device(first, ", ".join(labels), tuple(others))


def _divided_cpu(count: int) -> Device:
    if count == 1:
        return Device(HOST, "cpu")
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    )
    return Device(HOST, f"{count} cpus", tuple(f"/CPU:{index}" for index in range(1, count)))


def _label(gpu: Any) -> str:
    index = gpu.name.rsplit(":", 1)[1]
    details = tf.config.experimental.get_device_details(gpu)
    return str(details.get("device_name", f"gpu {index}"))


def choose_gpus(gpu: str, count: int) -> tuple[int, ...]:
    """Returns the indices that ``gpu`` means among ``count`` GPUs; no index means the CPU.

    Args:
        gpu: ``auto`` (the first GPU if there is one, else the CPU), ``none``, ``all``, or indices
            with commas between them.

    Raises:
        InvalidArgument: there is no such GPU.
    """
    if gpu == "none":
        return ()
    if gpu == "auto":
        return (0,) if count else ()
    indices = tuple(range(count)) if gpu == "all" else tuple(map(int, gpu.split(",")))
    if not indices or max(indices) >= count:
        found = f"GPUs 0 to {count - 1}" if count > 1 else "GPU 0" if count else "no GPU here"
        raise InvalidArgument(
            f"--gpu {gpu}: TensorFlow finds {found}; use --gpu none for the CPU, or check the "
            "driver and CUDA_VISIBLE_DEVICES",
            code="PS506",
        )
    return indices


def _total_memory_bytes(device: Any) -> int:
    """Returns the total memory of a GPU. Asks the driver, which numbers GPUs as TensorFlow does,
    because TensorFlow does not tell. Creates no context on the GPU."""
    index = int(device.name.rsplit(":", 1)[1])
    handle, nbytes = ctypes.c_int(), ctypes.c_size_t()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(handle), index)
            or driver.cuDeviceTotalMem_v2(ctypes.byref(nbytes), handle)
        )
    except (OSError, AttributeError) as error:
        failed = error
    if failed:
        raise InvalidArgument(
            f"--gpu-memory-fraction needs the size of the GPU's memory, and the driver does not "
            f"give it ({failed}); leave the option out to let memory grow as needed",
            code="PS506",
        )
    return nbytes.value


class ParameterBuffers:
    """One set of parameters: all arenas of the plan, each as a whole, in the order of the plan.

    ``arrays[name]`` is ``[length]``; ``tensors``, in the order of the plan, are views of the same
    memory in TensorFlow, on the CPU, bfloat16 as uint16. Writing an array changes its tensor, so no
    thread may write while a step that got the tensors runs, or while a result of that step is in
    use: an output of a step may be the buffer of an input (the gradient of ``sum(w * w) / 2`` is
    ``w``). A worker that pulls while it still pushes gradients alternates between two sets.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        """``arrays``: aligned and writable, arenas in plan order, in their own dtype or rounded.
        The caller keeps owning them."""
        self.arrays = arrays
        # Made once and kept: while this reference exists, TensorFlow does not overwrite the buffer
        # with results of its own.
        self.tensors: Sequence[tf.Tensor] = tuple(map(tensor_of, arrays.values()))

    @classmethod
    def of(cls, plan: Plan) -> ParameterBuffers:
        """Makes buffers of zeros, in memory of their own and in the dtypes of the plan."""
        arrays = {arena.name: aligned_empty(arena.length, arena.dtype) for arena in plan.arenas}
        for array in arrays.values():
            array.fill(0)
        return cls(arrays)


def tensor_of(array: Array) -> tf.Tensor:
    """Returns a tensor that shares the memory of ``array``, which must be aligned."""
    if array.dtype.name == "bfloat16":
        # NumPy's DLPack does not support it.
        array = array.view(np.uint16)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
