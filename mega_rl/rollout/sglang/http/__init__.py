"""Requests that steer one server: address, keys, calls with a deadline."""
