"""Commands that show runs: plot, report, view."""
