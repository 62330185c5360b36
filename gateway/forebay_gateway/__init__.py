"""The Forebay gateway: one daemon a node. ARCHITECTURE.md beside this package holds the map."""

from importlib.metadata import version

__version__ = version("forebay")
