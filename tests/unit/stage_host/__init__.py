"""Tests of a stage host on the network: sessions, streams and blobs."""
