"""Tasks that a wrong trainer fails; `mega-rl bench learn` trains them and judges the results."""
