"""What tests run on: a pool of ranks, an S3 server and a faulty line to it, NxD's parallel state without NxD."""
