"""The state of a job while it trains."""
