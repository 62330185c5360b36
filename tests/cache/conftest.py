"""Fixtures of cache/disk for every test in this folder."""

from cache.disk import plain_file, rig

__all__ = ["plain_file", "rig"]
