"""Runs one segment of the encoder: a stage host, and nothing else."""
