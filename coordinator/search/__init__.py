"""Decides for a study: its space, its points, and what follows a trial. Pure."""
