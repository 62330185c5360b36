"""The client: save checkpoints to a gateway, restore them from anywhere."""
