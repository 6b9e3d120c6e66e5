"""The client of the coordinator, for shards, workers and commands."""
