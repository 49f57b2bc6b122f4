"""A device that runs segments of the encoder."""
