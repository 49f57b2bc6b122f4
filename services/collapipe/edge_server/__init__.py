"""Runs the heads, keeps the global model, and averages the clusters into it."""
