"""Who belongs to the job, how a generation forms, and what recovers it. Pure."""
