"""Names of the Hugging Face Hub in settings and arguments: `org/name[@revision]`, downloaded once per node."""
