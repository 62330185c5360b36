"""What every component stands on: clock, background tasks, durable files, failpoints, logs, metrics."""
