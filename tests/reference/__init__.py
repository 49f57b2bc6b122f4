"""Trains in a single process, with whole models of `transformers`, as a reference for the pipeline.

The reference shares no code with the pipeline, the averaging and the services that it checks.

`centralized` trains one cluster, `fedavg` averages clusters, and `federated_job` runs a whole job with both.
`comparison` finds where two results differ.
"""
