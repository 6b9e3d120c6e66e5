"""A run's records on disk: its ledger, directory, curves and notes."""
