"""From outcomes of reward functions to rewards: texts of responses, named parts, failures."""
