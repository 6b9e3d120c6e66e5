"""The checkpoint format: manifest, shard files, row files and their chains."""
