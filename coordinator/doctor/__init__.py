"""Says why a cluster does not work."""
