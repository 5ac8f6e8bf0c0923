"""The disks of a job's hosts as one store: each rank writes on its own host, and reads what lies on any."""
