"""The process of the coordinator: settles a run, serves it, sums it up."""
