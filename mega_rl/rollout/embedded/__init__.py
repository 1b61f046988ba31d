"""Rollouts in the trainer's own process, by a Hugging Face model with the policy's weights."""
