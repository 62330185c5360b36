"""The operator's care: is every copy good, what is wrong, and what can be mended. One story a file.

`scrub` and `mend` work in the background; `verify`, `fsck`, `repair`, `quarantine`, `gc`, `rebuild` and `space` are commands.
Commands take the one maintenance lock (lock.py). What destroys something is a dry run until told otherwise.
"""
