"""What client and gateway must agree on: messages, the hot-path frame codec, checksums, names, manifests."""
