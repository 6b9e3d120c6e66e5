"""The rows of embedding tables in a shard: storage, index, updates. numpy alone, no I/O."""
