"""Options of a command: flag, environment, file, TF_CONFIG, default."""
