"""`mega-rl verify rl`: an independent trainer follows a real run in lockstep, update by update."""
