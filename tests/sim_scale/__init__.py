"""A thousand workers and a hundred shards of one coordinator in simulated time, with faults."""
