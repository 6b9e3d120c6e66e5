"""The metrics endpoint: an HTTP server with deadlines and its exporter."""
