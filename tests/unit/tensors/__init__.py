"""Tests of frames and codecs."""
