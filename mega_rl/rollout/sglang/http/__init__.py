"""Requests to one server: its address and keys, calls with a deadline, and the endpoints that steer it."""
