"""The command of a study, and where its trials run: this machine, or an engine."""
