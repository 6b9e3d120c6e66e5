"""Plain values and rules that all roles share: plan, policy, batch ids, tables, errors. Pure."""
