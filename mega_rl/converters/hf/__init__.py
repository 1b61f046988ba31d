"""config.json of a Hugging Face checkpoint and the files that lie beside the weights."""
