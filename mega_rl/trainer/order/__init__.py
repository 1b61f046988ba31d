"""Order of prompts that depends on the run itself: success rates from its own samples, and what a checkpoint keeps."""
