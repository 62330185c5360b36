"""Places below the cache: POSIX file systems, object stores, and memory for tests; one contract (base.py) for all."""
