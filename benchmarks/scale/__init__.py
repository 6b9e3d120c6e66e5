"""Load generators for many workers: the real coordinator with members of which only the tensors are
simulated, and real workers that sleep instead of computing."""
