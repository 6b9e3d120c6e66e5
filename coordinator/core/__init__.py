"""The values that describe a job, a run and its work. Pure."""
