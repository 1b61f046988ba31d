"""`mega-rl verify`: whether every parallel layout computes what one rank computes, on a model of the user's."""
