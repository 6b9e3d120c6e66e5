"""Admits, stages, applies and answers, under the lock of the shard. No network and no disk."""
