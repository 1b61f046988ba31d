"""Models and datasets of the Hugging Face Hub that settings and arguments name: `org/name[@revision]`."""
