"""Stores the states of units and the vocabularies as blobs, and moves them between hosts.

A blob is a sequence of bytes that is named by its SHA-256. `tensor_blob` turns tensors into blobs,
`blob_store` keeps blobs on disk, and `transfer` sends and fetches them with gRPC. At the end of every round,
the control unit fetches the weights and the optimizer states of all units that changed: see
`collapipe.control_unit.state_gathering`.

This module imports nothing, so that `stage_runtime` can use `tensor_blob` without an import of grpc.
"""
