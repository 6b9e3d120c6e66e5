"""Data sources: any record by its index, in the seeded order of an epoch."""
