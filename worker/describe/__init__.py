"""Describes a job without training: its plan, policy, data and tables, as JSON."""
