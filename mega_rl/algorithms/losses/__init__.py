"""Losses of the policy and of the critic, and the weights of their tokens."""
