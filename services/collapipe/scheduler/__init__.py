"""The scheduler service: registers hosts, decides the plans of every round, and runs jobs."""
