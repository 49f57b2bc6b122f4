"""What a round is decided from, the decision with its reasons, and estimates for people: no clock, thread, call or file of a service."""
