"""What a shard is asked and what it remembers, as plain values."""
