"""The edge server runs the heads of all clusters, averages their models, and keeps the global model."""
