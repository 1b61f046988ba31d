"""Plans map Hugging Face tensor elements to parameter elements on each rank, with a completeness proof."""
