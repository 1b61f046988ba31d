"""Small tasks that tell a right trainer from a broken one, with ablations, over seeds."""
