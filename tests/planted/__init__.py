"""Small patches that each break one rule, and the tests that must notice. See ``__main__``."""
