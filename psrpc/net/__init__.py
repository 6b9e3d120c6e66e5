"""Channels and servers: limits, overload, reachability, health, reflection."""
