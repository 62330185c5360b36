"""How bytes travel between client and gateway."""
