"""The S3 tier: objects behind the S3 API, through aiobotocore."""
