"""Plain values: the requests to a shard and the state that it keeps."""
