"""The web page of a run, and what it shows."""
