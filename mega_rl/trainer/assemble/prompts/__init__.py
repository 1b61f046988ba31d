"""Training prompts of a run: their order, and the sources of rollouts and rewards that go by it."""
