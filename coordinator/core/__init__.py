"""What a job, a run and its work are. Pure."""
