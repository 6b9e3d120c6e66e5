"""The contract that all roles share: values, formats, transport, security."""

SOFTWARE = "0.1.0"
"""The version that every process of a cluster must share."""
