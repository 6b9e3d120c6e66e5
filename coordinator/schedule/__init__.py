"""Assigns batches to workers: leases, rounds, second attempts, evaluation. Pure."""
