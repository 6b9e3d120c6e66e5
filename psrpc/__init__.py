"""The contract that all roles share: values, formats, transport, security."""
