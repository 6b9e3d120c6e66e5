"""Files in stores: an S3 server in this process."""
