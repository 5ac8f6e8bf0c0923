"""What S3 clients cost a process: ``python -m tools.bench.s3`` (``make bench-s3``)."""
