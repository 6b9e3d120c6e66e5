"""coordinator up benchmarks/jobs/dense_256x16KB.py, from the repository's root."""

from benchmarks.dense_job import dense_job
from benchmarks.workloads import DENSE

job = dense_job(DENSE["dense_256x16KB"])
