"""Status and progress on a terminal."""
