"""The second opinion: training as a plain single-process loop over whole models of `transformers`.

Written from the rules alone, sharing no code with the pipeline, the aggregation or the services that it checks.

Guided tour: `centralized` trains one cluster, `fedavg` averages clusters, `federated_job` runs a whole job with both,
`comparison` says where two results differ.
"""
