"""CollaPipe: Transformers trained collaboratively on devices too small to hold them."""

import os

# gRPC reads it when it is imported. What goes wrong is raised, and reported once, in our words.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
