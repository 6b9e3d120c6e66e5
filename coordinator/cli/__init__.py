"""The command line of ``coordinator``."""
