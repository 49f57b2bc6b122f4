"""The control unit owns the data of a cluster, runs the embedding, and drives the pipeline."""
