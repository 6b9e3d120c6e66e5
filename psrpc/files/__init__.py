"""Files that last: atomic writes, durable names, run directories, URLs."""
