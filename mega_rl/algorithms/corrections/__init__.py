"""Corrections of the policy loss for tokens that other weights, or another engine, sampled."""
