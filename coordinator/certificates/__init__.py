"""Issues certificates, and keeps the audit log."""
