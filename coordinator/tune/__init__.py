"""Runs a study: its loop, its journal, its display, and trials on this machine."""
