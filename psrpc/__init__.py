"""What more than one role needs. Knows no role."""
