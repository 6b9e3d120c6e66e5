"""Certificates, identities, permissions, revocation and signatures."""
