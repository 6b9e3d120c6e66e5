"""coordinator up benchmarks/jobs/emb_65536.py, from the repository's root."""

from benchmarks.row_job import row_job
from benchmarks.workloads import ROWS

job = row_job(ROWS["emb_65536"])
