"""coordinator up benchmarks/jobs/mnist_dnn.py --workers 3, from the repository's root."""

from benchmarks.mnist_job import mnist_job
from benchmarks.workloads import MNIST

job = mnist_job(MNIST["mnist_dnn"])
