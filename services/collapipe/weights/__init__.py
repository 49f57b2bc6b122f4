"""The weights plane: states of units as blobs, named by their digest, kept on disk and moved between hosts."""
