"""Owns a cluster's data and the embedding, and drives the cluster's pipeline through each round."""
