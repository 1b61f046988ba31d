"""Safetensors files: headers checked before they are read, rectangles read, writers, and folders that appear whole."""
