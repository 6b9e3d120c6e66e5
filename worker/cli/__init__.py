"""The command line of ``worker``."""
