"""What happens in the life of a job is decided here, by functions that return a new state and leave the old one as it is.

Nothing here reads a clock, a file or a message, or starts a thread.
"""
