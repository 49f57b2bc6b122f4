"""Tests of tensors as bytes: frames and blobs."""
