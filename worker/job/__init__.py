"""The user's job: its fields, settings and phases, and the loader of job files."""
