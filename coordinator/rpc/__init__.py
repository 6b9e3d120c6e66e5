"""The gRPC service of the coordinator."""
