"""Stores the states of units and the vocabularies as blobs, and moves them between hosts.

This module imports nothing, so that `stage_runtime` can use `tensor_blob` without an import of grpc.
"""
