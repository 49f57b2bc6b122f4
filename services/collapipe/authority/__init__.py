"""The service that lets boxes join: a token in, a certificate out."""
