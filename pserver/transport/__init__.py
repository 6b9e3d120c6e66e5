"""Carries tensors: gRPC streams, shared memory, data connections."""
