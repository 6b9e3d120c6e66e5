"""The clients of shards, for workers and readers."""
