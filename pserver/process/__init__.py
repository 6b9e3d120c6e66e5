"""The process of a shard: its registration, heartbeats, commands and end."""
