"""What places engine hosts on machines: Ray."""
