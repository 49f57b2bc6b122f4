"""What every service tells about itself: metrics for Prometheus, and logs."""
