"""The POSIX tier: plain files on a mounted file system."""
