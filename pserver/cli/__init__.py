"""The command line of ``pserver``."""
