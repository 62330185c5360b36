"""Fixtures of catalog/kit for every test in this folder."""

from catalog.kit import catalog

__all__ = ["catalog"]
