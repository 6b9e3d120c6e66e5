"""Does what :mod:`worker.protocol` decides: leases, pulls, computes, pushes, reports."""
