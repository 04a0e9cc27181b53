"""What a system is compared with."""
