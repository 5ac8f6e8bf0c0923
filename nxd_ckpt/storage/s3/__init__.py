"""Amazon S3, and what speaks its protocol, as a storage."""
