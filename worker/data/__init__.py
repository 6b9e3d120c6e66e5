"""Data sources: any record by its index, in an order that the epoch decides."""
