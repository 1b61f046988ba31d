"""config.json of a Hugging Face checkpoint and the files next to the weights."""
