"""The node's cache: sealed shard files on a local disk, written and read around the page cache."""
