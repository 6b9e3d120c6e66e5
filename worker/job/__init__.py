"""What users write: the job, its settings and phases, and how a job file is loaded."""
