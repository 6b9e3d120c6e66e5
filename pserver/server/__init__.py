"""The gRPC service of a shard."""
