"""The documentation: the site that is built from it, and the commands that its pages show."""
