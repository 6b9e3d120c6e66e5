"""Seeded schedules of faults against real processes, and what must hold after each of them."""
