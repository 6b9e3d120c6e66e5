"""Who asks for a study, and where its trials run: this machine, or an engine."""
