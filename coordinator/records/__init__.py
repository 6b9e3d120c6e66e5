"""What a run keeps on disk: its ledger, directory, curves and notes."""
