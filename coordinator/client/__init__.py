"""What shards, workers and commands call."""
