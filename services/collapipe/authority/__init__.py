"""The service of the authority, which gives certificates to boxes that join."""
