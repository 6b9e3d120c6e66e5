"""Admits, stages and applies requests under the shard's lock. No network and no disk."""
