"""Processes that move bytes between cache and tiers, so that the front's event loop never waits for a tier's bytes."""
