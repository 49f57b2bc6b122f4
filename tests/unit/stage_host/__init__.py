"""Tests of a stage host on the network: fences, links and blobs."""
