"""Requests to one server: its address and keys, one call with a deadline, and the endpoints that steer it."""
