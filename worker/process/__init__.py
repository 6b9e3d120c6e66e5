"""The process of a worker."""
