"""Which worker gets which batch: leases, rounds, second attempts, evaluation. Pure."""
