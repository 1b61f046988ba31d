"""Plans: which element of which Hugging Face tensor is which element of a parameter on each rank, and the proof."""
