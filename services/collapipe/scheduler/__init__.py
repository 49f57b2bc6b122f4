"""Knows the hosts, decides every round, and takes jobs through their rounds."""
