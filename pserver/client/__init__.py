"""What a worker or a reader calls."""
