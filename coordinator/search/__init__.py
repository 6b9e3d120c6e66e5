"""The space of a study, its points, and what follows a trial. Pure."""
