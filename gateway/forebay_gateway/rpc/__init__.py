"""The services: decode, one call into paths/, encode. One file a service; status.py is the one error-to-code table."""
