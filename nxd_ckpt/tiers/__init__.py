"""Copies of tags on further places, and replicas on the disks of hosts."""
