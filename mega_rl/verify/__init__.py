"""`mega-rl verify`: does every parallel layout of a model compute what one rank computes?"""
