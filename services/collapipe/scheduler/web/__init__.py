"""The page in the browser: who may see it, what it shows, and how it is served. Nothing of it holds up a call of gRPC."""
