"""Amazon S3, and stores with its protocol, as a storage."""
