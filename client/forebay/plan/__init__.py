"""What storage a checkpoint interval needs, and which interval a storage carries: arithmetic, without I/O but for ssd.py."""
