"""Logs, traces, clocks, threads and retries of a process."""
